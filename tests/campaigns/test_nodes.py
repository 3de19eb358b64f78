"""Two machines, random faults one after the other: never two attempts at once, and the result of an undisturbed run."""

import os
import random
import threading
import time

import netns
import pytest
from monitor_helpers import status, wait_for
from nodes_helpers import CUT, Group, group

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())]
EVENTS = int(os.environ.get("NODES_CHAOS_EVENTS", "12"))
PATIENT = CUT.replace(
    "[restart]\n", "[restart]\nin_all_count = 1000\nwithout_progress_count = 100\nbackoff_last_s = 2\n"
)
STEPS = 1200


def attempts_alive(machines: Group) -> list[tuple[int, int, str]]:
    """(machine, pid, attempt) of every trainer that lives now."""
    found = []
    for node in range(len(machines.machines)):
        for pid in machines.trainers(node):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    variables = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
            except OSError:
                continue
            if b"HANGPROOF_ATTEMPT" in variables:
                found.append((node, pid, variables[b"HANGPROOF_ATTEMPT"].decode()))
    return found


def follow(machines: Group, stop: threading.Event, wrong: list[object]) -> None:
    """Note every moment with two trainers of one rank, or with trainers of two attempts."""
    while not stop.is_set():
        first = attempts_alive(machines)
        alive = [row for row in attempts_alive(machines) if row in first]  # those that lived through both readings
        nodes = [node for node, _, _ in alive]
        if len(nodes) != len(set(nodes)) or len({attempt for *_, attempt in alive}) > 1:
            wrong.append((alive, machines.attempts()))
        time.sleep(0.02)


def disturb(machines: Group, dice: random.Random) -> str:
    """One random fault; its name."""
    other = machines.machines[1]
    what = dice.choice(["cut", "long cut", "rank 0", "rank 1", "monitor 0", "monitor 1", "power"])
    if what.endswith("cut"):
        other.link(False)
        time.sleep(dice.uniform(6, 9) if what == "long cut" else dice.uniform(0.2, 3.5))
        other.link(True)
    elif what == "power":
        other.power_off()
        time.sleep(dice.uniform(0, 6))
        machines.start(1)
    else:
        find = machines.trainers if what.startswith("rank") else machines.monitors
        pids = find(int(what[-1]))
        for pid in pids:
            os.kill(pid, 9)
        what += "" if pids else " (none there)"
    return what


@pytest.mark.parametrize("seed", [int(os.environ.get("NODES_CHAOS_SEED", "1"))])
def test_random_faults_never_double_a_trainer_and_the_result_is_that_of_an_undisturbed_run(tmp_path, seed):
    dice, stop, wrong, done = random.Random(seed), threading.Event(), [], []
    with group(tmp_path, limits=PATIENT, clocks_s=(0, 9000)) as two:
        two.toy(steps=STEPS, pace=0.04, every=10)
        two.start()
        two.wait_step(5)
        watcher = threading.Thread(target=follow, args=(two, stop, wrong))
        watcher.start()
        try:
            while len(done) < EVENTS and status(two.run)["state"] != "completed":
                step = two.step()
                done.append(f"{disturb(two, dice)} at step {step}")
                if dice.random() < 0.7:  # else the next one comes while the group still recovers
                    wait_for(lambda step=step: two.step() > step + 3, 90, f"progress after {done}")
                else:
                    time.sleep(dice.uniform(0, 3))
            two.completed(STEPS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{done}\n{two.console()}") from None
        finally:
            stop.set()
            watcher.join()
    assert not wrong, f"{wrong[:3]}\n{done}"
    print(f"seed {seed}: {done}; attempts: {two.attempts()}")
