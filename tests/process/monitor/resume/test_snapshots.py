"""What ends a run, or what the system refuses, costs no steps: real runs of the toy loop under the real monitor."""

import functools
import os
from pathlib import Path

import pytest
from monitor_helpers import wait_for
from run_facts import status
from standby_helpers import Run

from benchmarks import toy_loop
from guards import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")]

STEPS = 60
ONE_FAILURE = "[restart]\nwithout_progress_count = 1\nbackoff_first_s = 0.5\n"


@pytest.fixture
def run(tmp_path):
    """A run whose only checkpoints on the disk are those that something other than its schedule makes."""
    (tmp_path / "hurry").touch()
    return Run(tmp_path, steps=STEPS, every=10_000, limits=ONE_FAILURE)


def states(run: Run) -> dict[int, Path]:
    return {checkpoint.guard_of(path)["step"]: path for path in checkpoint.states(run.folder)}


def steps(run: Run) -> list[int]:
    return run.toy.trained(run.data)


def test_a_stop_at_once_has_the_newest_steps_on_the_disk(run):
    process = run.start()
    wait_for(lambda: len(steps(run)) >= 20)
    (run.folder / "stop.request").write_text('{"now": true}', encoding="utf-8")
    run.finish(process, code=3)
    step, state = max(states(run).items())
    weights = functools.reduce(toy_loop.advance, range(1, step + 1), b"")
    assert step >= len(steps(run)) - 10 and (state / "weights.bin").read_bytes() == weights
    assert status(run.folder)["state"] == "stopped" and state.name in status(run.folder)["reason"]


def test_steps_that_the_disk_refuses_stay_in_memory_and_the_next_start_goes_on_from_them(run, tmp_path):
    """The interpreter that writes them fails: as on a full disk, nothing is written and nothing is freed."""
    (tmp_path / "broken").mkdir()
    shim = "import sys\nif 'guards.snapshot_files' in sys.orig_argv:\n    sys.exit('No space left on device')\n"
    (tmp_path / "broken" / "sitecustomize.py").write_text(shim, encoding="utf-8")
    run.finish(run.start(TOY_FAULTS="raises@40", PYTHONPATH=str(tmp_path / "broken")), code=4)
    now = status(run.folder)
    assert now["state"] == "failed" and "stay in memory" in now["reason"] and states(run) == {}
    run.finish(run.start())
    assert steps(run).count(30) == 1  # no step before the fault is trained twice
    run.check_complete(restarts=0)
