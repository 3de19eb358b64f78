"""Several machines, one run: a leader, nodes, and what happens when a part of them fails."""

import json
import os
import signal
import sys
import time

import netns
import pytest
from monitor_helpers import incidents, status, wait_for
from nodes_helpers import CUT, TOKEN, group

from guards import checkpoint

EXIT_STOPPED, EXIT_BUDGET, EXIT_PREEMPTED = 3, 4, 5
pytestmark = pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())


def test_an_undisturbed_run_on_two_machines_completes_with_the_same_result(tmp_path):
    with group(tmp_path, clocks_s=(0, 54321)) as two:
        two.toy()
        two.start()
        now = two.completed(restarts=0)
    assert now["incidents"] == 0 and two.attempts() == [1]


def test_a_link_that_is_cut_for_longer_than_the_limit_ends_both_parts_and_the_group_restarts_when_it_is_back(tmp_path):
    with group(tmp_path, limits=CUT) as two:
        two.toy(steps=60)
        two.start()
        two.wait_step(15)
        two.machines[1].link(False)
        for node in (0, 1):
            wait_for(lambda node=node: not two.trainers(node), 30, f"machine {node} ends its rank by itself")
        assert status(two.run)["state"] in ("recovering", "backoff")
        two.machines[1].link(True)
        now = two.completed(60, restarts=1)
    (incident,) = incidents(two.run)
    assert incident["cause"] == "node_lost" and now["incidents"] == 1
    assert "node 1" in incident["explanation"] and "rank 1" in incident["explanation"]
    assert incident["evidence"]["rank"] == 1 and incident["resumed_from"] >= 10
    assert two.attempts() == [1, 2]


@pytest.mark.long
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


def test_a_killed_leader_is_replaced_the_nodes_come_back_and_no_trainer_is_doubled(tmp_path):
    with group(tmp_path) as two:
        two.toy(steps=100)
        two.start()
        two.wait_step(10)
        ranks = two.trainers(0) + two.trainers(1)
        assert len(ranks) == 2
        two.kill(two.monitors(0))
        two.wait_step(60)
        assert two.trainers(0) + two.trainers(1) == ranks
        two.completed(100, restarts=0)
    assert two.attempts() == [1]


@pytest.mark.long
def test_a_machine_that_loses_its_power_comes_back_and_the_group_restarts(tmp_path):
    with group(tmp_path, limits=CUT) as two:
        two.toy(steps=60)
        two.start()
        two.wait_step(15)
        two.machines[1].power_off()
        wait_for(lambda: not two.trainers(0), 30, "the leader ends its rank")
        two.start(1)
        two.completed(60, restarts=1)


HANG = "def fault(step):\n    if node == 1 and attempt == 1 and step == 34:\n        read_the_caption()\ndef read_the_caption():\n    time.sleep(3600)\n"


def test_a_hung_rank_of_another_machine_is_named_with_its_stack_beside_that_of_the_others(tmp_path):
    with group(tmp_path, clocks_s=(0, 4000)) as two:
        two.toy(HANG, steps=60)
        two.start()
        two.completed(60, restarts=1)
    (incident,) = incidents(two.run)
    evidence = incident["evidence"]
    assert incident["kind"] == "hang" and evidence["rank"] == 1 and evidence["step"] == 33, incident
    stacks = (two.run / "incidents" / "0001" / "stacks.txt").read_text(encoding="utf-8")
    assert "read_the_caption" in stacks and "all_reduce" in stacks
    silent = {r["rank"]: r["silent_s"] for r in evidence["ranks"]}
    assert all(0 <= s < 60 for s in silent.values()), "the other clock is translated"
    assert len({r["pid"] for r in evidence["ranks"]}) == 2


def test_a_stop_saves_a_checkpoint_and_ends_all_machines(tmp_path):
    with group(tmp_path) as two:
        two.toy(steps=1000)
        two.start()
        two.wait_step(15)
        (two.run / "stop.request").write_text("{}")
        assert two.finish() == [EXIT_STOPPED, EXIT_STOPPED], two.console()
        assert two.living() == {}
    now = status(two.run)
    assert now["state"] == "stopped" and now["checkpoint"]["step"] == now["step"]


@pytest.mark.long
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


@pytest.mark.long
def test_a_shared_folder_is_noticed_and_nothing_is_copied(tmp_path):
    with group(tmp_path, shared=True) as two:
        two.toy(steps=60)
        two.start()
        two.wait_step(15)
        two.kill(two.trainers(0))
        two.completed(60, restarts=1)
    assert not list(tmp_path.rglob("*.part")) and not (tmp_path / "m1" / "toy" / "train.sh").exists()


@pytest.mark.long
def test_a_node_with_another_secret_takes_no_part_and_says_so(tmp_path):
    with group(tmp_path, limits=CUT.replace("return_s = 60", "return_s = 3")) as two:
        two.toy()
        two.start(0)
        two.start(1, HANGPROOF_NODE_TOKEN="x" * 32)
        assert two.finish() == [EXIT_BUDGET, EXIT_PREEMPTED], two.console()
        assert "node 1 has not connected yet" in status(two.run)["reason"]
    assert "another HANGPROOF_NODE_TOKEN" in (two.folder(1) / "monitor.node-1.log").read_text(encoding="utf-8")
    assert TOKEN not in two.console() and "x" * 32 not in two.console()


@pytest.mark.long
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


@pytest.mark.long
def test_a_node_without_a_leader_gives_up_after_its_time(tmp_path):
    with group(tmp_path, limits=CUT.replace("return_s = 60", "return_s = 3")) as two:
        two.toy(steps=1000)
        two.start()
        two.wait_step(15)
        two.machines[0].power_off()
        assert two.processes[1].wait(60) == EXIT_PREEMPTED and not two.trainers(1)
    assert "gave up: no contact with the leader" in (two.folder(1) / "monitor.node-1.log").read_text(encoding="utf-8")


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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
