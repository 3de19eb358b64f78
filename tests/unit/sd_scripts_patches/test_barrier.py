"""A barrier of accelerate that one rank never reaches."""

import children

from guards import heartbeat

MEETS = """
import sys, time
from types import SimpleNamespace
from sd_scripts_patches import barrier, session
session.heartbeat().phase("cache_latents")
barrier._with_deadline(lambda accelerator: time.sleep(0.8))(SimpleNamespace(num_processes=int(sys.argv[1])))
"""
BUILT_IN = "import time; from guards import world\nwith world.barrier(0.3, 'the caches'): time.sleep(0.8)"


def test_a_barrier_ends_the_process_with_its_phase_and_that_of_the_other_ranks_and_one_process_has_none(tmp_path):
    other = heartbeat.Heartbeat(heartbeat.path_of(tmp_path, 1), 1, 2)
    other.step(12)
    other.phase("save")
    limit = {"RANK": 0, "HANGPROOF_BARRIER_TIMEOUT_S": 0.3, "HANGPROOF_HEARTBEAT": tmp_path}
    late = children.run(MEETS, 2, WORLD_SIZE=2, **limit)
    waited = "waited 0.3 s for all 2 ranks at a barrier (this is rank 0, phase cache_latents); rank 1: phase save"
    assert late.returncode == 75 and waited in late.stderr
    assert [children.run(code, 1, WORLD_SIZE=1, **limit).returncode for code in (MEETS, BUILT_IN)] == [0, 0]
