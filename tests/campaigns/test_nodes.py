"""Two and three machines, whatever fails: never two attempts at once, and the result of an undisturbed run.

python -m pytest tests/campaigns/test_nodes.py          8 minutes; HANGPROOF_SEED repeats the random faults
"""

import json
import os
import random
import signal
import sys
import threading
import time

import netns
import pytest
from monitor_helpers import incidents, status, wait_for
from nodes_helpers import CUT, TOKEN, Group, group
from seeds import seed

from guards import checkpoint

pytestmark = pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())
EXIT_STOPPED, EXIT_BUDGET, EXIT_PREEMPTED = 3, 4, 5
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


@pytest.mark.parametrize("number", [seed()])
def test_random_faults_never_double_a_trainer_and_the_result_is_that_of_an_undisturbed_run(tmp_path, number):
    dice, stop, wrong, done = random.Random(number), threading.Event(), [], []
    with group(tmp_path, limits=PATIENT, clocks_s=(0, 9000)) as two:
        two.toy(steps=STEPS, pace=0.04, every=10)
        two.start()
        two.wait_step(5)
        watcher = threading.Thread(target=follow, args=(two, stop, wrong))
        watcher.start()
        try:
            while len(done) < 12 and status(two.run)["state"] != "completed":
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
    print(f"{done}; attempts: {two.attempts()}")


def test_a_link_that_is_cut_for_ever_stops_the_run_with_the_rank_the_machine_and_the_reason(tmp_path):
    with group(tmp_path, limits=CUT.replace("return_s = 60", "return_s = 5")) as two:
        two.toy(steps=1000)
        two.start()
        two.wait_step(15)
        two.machines[1].link(False)
        assert two.finish() == [EXIT_BUDGET, EXIT_PREEMPTED]
        now = status(two.run)
        assert now["state"] == "failed" and two.living() == {}
    for part in ("node 1", two.machines[1].address, "rank 1", "has not been heard from", "step"):
        assert part in now["reason"], now["reason"]
    assert checkpoint.newest_valid(two.run) is not None


def test_a_killed_monitor_of_a_node_is_replaced_and_adopts_its_rank(tmp_path):
    with group(tmp_path) as two:
        two.toy(steps=100)
        two.start()
        two.wait_step(10)
        rank = two.trainers(1)
        two.kill(two.monitors(1))
        two.wait_step(60)
        assert two.trainers(1) == rank
        two.completed(100, restarts=0)
    assert two.attempts() == [1]


def test_a_node_whose_machine_is_taken_away_saves_first_and_the_run_can_be_resumed(tmp_path):
    with group(tmp_path) as two:
        two.toy(steps=200)
        two.start()
        two.wait_step(15)
        for pid in two.machines[1].find("keeper.sh") or two.machines[1].find("--keep"):
            os.kill(pid, signal.SIGTERM)
        assert two.finish() == [EXIT_PREEMPTED, EXIT_PREEMPTED], two.console()
        assert two.living() == {}
        assert status(two.run)["state"] == "preempted" and status(two.run)["checkpoint"]["step"] >= 15
        two.start()
        two.completed(200)


def test_a_shared_folder_is_noticed_and_nothing_is_copied(tmp_path):
    with group(tmp_path, shared=True) as two:
        two.toy(steps=60)
        two.start()
        two.wait_step(15)
        two.kill(two.trainers(0))
        two.completed(60, restarts=1)
    assert not list(tmp_path.rglob("*.part")) and not (tmp_path / "m1" / "toy" / "train.sh").exists()


def test_a_node_with_another_secret_takes_no_part_and_says_so(tmp_path):
    with group(tmp_path, limits=CUT.replace("return_s = 60", "return_s = 3")) as two:
        two.toy()
        two.start(0)
        two.start(1, HANGPROOF_NODE_TOKEN="x" * 32)
        assert two.finish() == [EXIT_BUDGET, EXIT_PREEMPTED], two.console()
        assert "node 1 has not connected yet" in status(two.run)["reason"]
    assert "another HANGPROOF_NODE_TOKEN" in (two.folder(1) / "monitor.node-1.log").read_text(encoding="utf-8")
    assert TOKEN not in two.console() and "x" * 32 not in two.console()


def test_a_first_machine_that_loses_its_power_is_waited_for_and_continues_its_run(tmp_path):
    with group(tmp_path, limits=CUT) as two:
        two.toy(steps=60)
        two.start()
        two.wait_step(15)
        two.machines[0].power_off()
        wait_for(lambda: not two.trainers(1), 30, "the node ends its rank by itself")
        two.start(0)
        two.completed(60)
    assert two.attempts() == [1, 2]


def test_three_machines_train_together_and_a_node_that_cannot_is_named(tmp_path):
    with group(tmp_path, 3) as three:
        three.toy(steps=60)
        three.start()
        three.wait_step(15)
        three.kill(three.trainers(2))
        three.completed(60, restarts=1)
        (incident,) = incidents(three.run)
        assert incident["evidence"]["rank"] == 2 and "node 2" in incident["evidence"]["ended"]
    with group(tmp_path / "other") as two:
        two.toy()
        two.start(0)
        two.nodes_name = "another"
        two.start(1)
        assert two.finish()[0] == 1, two.console()
    assert "node 1: the leader trains toy, this node was started for another" in status(two.run)["reason"]


def test_diagnose_shows_the_ranks_of_all_machines(tmp_path):
    with group(tmp_path) as two:
        two.toy(steps=1000)
        two.start()
        two.wait_step(15)
        time.sleep(1.5)
        done = two.machines[0].inside(
            two.monitors(0)[0], [sys.executable, "-m", "monitor", "diagnose", str(two.run), "--json"], two.env(0)
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert [r["rank"] for r in found["ranks"]] == [0, 1], done.stdout + done.stderr
        assert all(r["step"] >= 10 for r in found["ranks"]) and "on node 1" in done.stdout
        (one,) = status(two.run)["nodes"]
        assert (one["node"], one["ranks"], one["phase"]) == (1, [1], "running") and one["silent_s"] < 3


def test_a_rank_of_another_machine_that_fails_again_and_again_stops_the_run_with_the_machine_the_rank_and_its_error(
    tmp_path,
):
    with group(tmp_path) as two:
        two.toy("def fault(step):\n    if node == 1 and step == 15:\n        raise KeyError('lora')\n")
        two.start()
        assert two.finish() == [EXIT_BUDGET, EXIT_BUDGET], two.console()
        assert two.living() == {}
    reason = status(two.run)["reason"]
    for part in ("Node 1", two.machines[1].address, "rank 1", "KeyError: 'lora'", "See incidents"):
        assert part in reason, reason


def test_a_killed_rank_of_another_machine_is_named_and_the_group_restarts(tmp_path):
    with group(tmp_path) as two:
        two.toy(steps=60)
        two.start()
        two.wait_step(15)
        two.kill(two.trainers(1))
        two.completed(60, restarts=1)
    (incident,) = incidents(two.run)
    assert incident["cause"] == "killed" and incident["evidence"]["rank"] == 1, incident
    assert "node 1" in incident["evidence"]["ended"] and "SIGKILL" in incident["evidence"]["ended"]
