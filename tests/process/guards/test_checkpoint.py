"""What a killed writer of states leaves."""

import random
import signal
import time

import children

from guards import checkpoint

WRITER = """
import sys
from pathlib import Path
from guards import checkpoint
folder, step = Path(sys.argv[1]), 0
while True:
    step += 1
    with checkpoint.writing(folder / f"lora-step{step % 3:08d}-state", step=step, epoch=1) as temporary:
        for part in range(4):
            (temporary / f"part{part}.bin").write_bytes(str(step).encode() * 20000)
    print(step, flush=True)
"""


def test_kills_at_any_moment_never_leave_an_incomplete_state_that_verifies(tmp_path):
    """Each state that verifies is complete, at most one step is lost, and a sweep removes what killed writers left."""
    dice = random.Random(7)
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = children.start(WRITER, folder)
        steps = [int(process.stdout.readline()) for _ in range(2)]
        time.sleep(dice.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        steps += [int(line) for line in process.communicate()[0].split("\n") if line]
        newest = checkpoint.newest_valid(folder)
        step = checkpoint.guard_of(newest)["step"]
        assert step in (steps[-1], steps[-1] + 1)
        assert all((newest / f"part{p}.bin").read_bytes() == str(step).encode() * 20000 for p in range(4))
        checkpoint.sweep(folder)
        assert [p for p in folder.iterdir() if p.name.startswith(".")] == []
