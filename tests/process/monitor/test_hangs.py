"""The hang of one of two ranks: explained, killed, and recovered."""

import sys

import pytest
from monitor_helpers import ROOT, incidents, report, status, supervise, trainers

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="stacks are asked for by a signal")]
RANKS = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from guards import checkpoint, crash
from guards.heartbeat import Heartbeat
run, rank, attempt = Path(os.environ["HANGPROOF_RUN"]), int(os.environ["RANK"]), int(os.environ["HANGPROOF_ATTEMPT"])
meet = run / f"meet-{{attempt}}"
meet.mkdir(exist_ok=True)
hb = Heartbeat.from_env()
crash.install(hb)

def barrier(step):
    (meet / f"{{rank}}-{{step}}").touch()
    while not (meet / f"{{1 - rank}}-{{step}}").exists():
        time.sleep(0.005)

hb.plan(50)
hb.phase("first_step")
for step in range(1, 51):
    time.sleep(0.02)
    if attempt == 1 and rank == 1 and step == 35:
        time.sleep(3600)
    barrier(step)
    hb.step(step)
if rank == 0:
    checkpoint.atomic_write(run / "toy.safetensors", "done")
hb.end("done")
crash.exit_now(0)
"""


def test_of_two_ranks_the_one_that_hangs_is_named_and_both_start_again(folder):
    folder.mkdir()
    (folder / "toy.py").write_text(RANKS)
    start = f"WORLD_SIZE=2 {sys.executable} toy.py"
    # As torchrun does: the first that fails ends the group.
    (folder / "train.sh").write_text(
        f"cd {folder}\nRANK=0 {start} & a=$!\nRANK=1 {start} & b=$!\n"
        "wait -n; code=$?\n[ $code = 0 ] || kill -9 $a $b 2>/dev/null\nwait $a && wait $b\n"
    )
    assert supervise(folder, limits="[watch]\nwarmup_floor_s = 1\n")[0] == 0
    (incident,) = incidents(folder)
    assert (incident["kind"], incident["cause"], incident["step"]) == ("hang", "collective", 34)
    text = report(folder)
    assert len(incident["evidence"]["ranks"]) == 2 and "Rank 0 (pid" in text and "Rank 1 (pid" in text
    assert "The other ranks were waiting for rank 1." in text
    assert status(folder)["state"] == "completed" and trainers(folder) == []
