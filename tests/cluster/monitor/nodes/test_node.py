"""Several machines, one run: a leader, nodes, and what happens when a part of them fails. tests/campaigns/test_nodes.py has the rest."""

import netns
import pytest
from monitor_helpers import incidents, status, wait_for
from nodes_helpers import CUT, group

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())]
EXIT_STOPPED = 3


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
