"""The queue's process, monitors, keepers and trainings are killed at random moments; every run ends right.

python -m pytest tests/campaigns/test_run_queue.py          5 minutes; HANGPROOF_SEED repeats one
"""

import random
import time

import pytest
from monitor_helpers import events
from queue_helpers import command, ended, made, one_gpu, processes  # noqa: F401 - a fixture
from run_facts import members, status, weight
from seeds import seed
from toys import undisturbed

from jobs import queue


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [seed(), seed() + 1])
def test_kills_lose_nothing_and_start_nothing_twice(data, number):
    draw = random.Random(number)
    folders = made(data, *(f"run-{n}" for n in range(6)), steps=40)
    for folder in folders:
        queue.add(folder)
    done = 0
    until = time.monotonic() + 300
    while not all((folder / "status.json").exists() and ended(folder) for folder in folders):
        assert time.monotonic() < until, [status(f) if (f / "status.json").exists() else f for f in folders]
        time.sleep(draw.uniform(0.1, 1.0))
        alive = [folder for folder in folders if members(folder)]
        assert len(alive) <= 1, f"two trainings at once: {alive}"
        if done < 20:
            kind = draw.choice(("work", "work", "--child", "toy.py"))
            for victim in processes(data, kind)[:1]:
                victim.kill()
                done += 1
        if not processes(data, "work"):
            command("monitor", "resume-all")  # what a reboot, or the page, does
    assert all(weight(folder) == undisturbed(40) for folder in folders)
    for folder in folders:  # a start beside a monitor that was just killed may find nothing left to train
        assert len([event for event in events(folder, "completed") if event["reached"]]) == 1
