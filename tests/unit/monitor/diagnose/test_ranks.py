"""The rank report as a pure function: which rank is stuck, where, and the text that says so."""

import json
import time

import pytest
from monitor_evidence import beat, frames, hang, proc, scope

from guards import startup
from guards.heartbeat import WAITS, Heartbeat, path_of, read
from monitor.diagnose import collect, ranks
from monitor.process import platform

BARRIER_STACK = frames("distributed_c10d.py:barrier", "state.py:wait_for_everyone", "setup.py:barrier")
REDUCE_STACK = frames("distributed_c10d.py:all_reduce", "operations.py:reduce", "loop.py:average")
FLOW = ("arguments", "folders", "data", "accelerator", "tracker", "model", "tokenizer", "network", "loader", "ready")


def starting(number: int, *passed: str, world: int = 4, **values) -> dict:
    """A rank that has reached these check points, one second each, and stays in the last."""
    points = [
        {"number": startup.number(name), "name": name, "at": f"2026-01-02T03:04:{i:02d}.000Z", "elapsed_s": float(i),
         "spent_s": 1.0}
        for i, name in enumerate(passed)
    ]  # fmt: skip
    known = {
        "rank": number, "world": world, "local_rank": number, "pid": 100 + number, "phase": "load", "planned": 40,
        "point": passed[-1] if passed else "", "silent_s": 5.0, "point_ago_s": 5.0, "points": points, "host": "h",
        "device": "cpu", "backend": "gloo", "environment": {"RANK": str(number), "WORLD_SIZE": str(world)}, "alive": True,
    }  # fmt: skip
    return ranks.UNKNOWN | known | values


def training(number: int, step: int = 90, **values) -> dict:
    return starting(number, *startup.NAMES[:11], step=step, count=step, phase="step") | values


def verdict(group: list[dict], *stacks: str, stopped=(), **more):
    """The verdict on ranks with these stacks, in the order of their numbers; "" is a missing one."""
    return ranks.Group(group, {100 + n: text for n, text in enumerate(stacks) if text}, stopped).verdict(**more)


def test_the_rank_that_never_reached_a_check_point_is_named_with_what_the_others_do():
    group = [starting(n, *FLOW[: 6 if n == 1 else 7]) for n in range(4)]
    said = verdict(group, BARRIER_STACK, frames("models.py:load", "setup.py:build"), BARRIER_STACK, BARRIER_STACK)
    assert said.rank == 1 and said.text == (
        "Rank 1 stopped at check point 4 (base model) and never reached the next one, 3 (tokenizers and text encoders), while "
        "ranks 0, 2 and 3 wait for it in a barrier. It is in load (models.py:1)."
    )
    assert "disk" in said.advice
    assert verdict([starting(0, *FLOW[:8]), starting(1, *FLOW[:8]), starting(2, *FLOW[:5])]).rank == 2, "no stacks"


def test_all_ranks_at_one_check_point_are_one_verdict():
    said = verdict([starting(n, *FLOW[:9]) for n in range(4)], *[frames("loader.py:read")] * 4)
    text = "All 4 ranks stopped at check point 9 (data loader and optimizer)."
    assert (said.text, said.advice, said.rank) == (text, ranks.ADVICE["loader"], None)


def test_a_rank_that_has_not_ended_a_step_is_named_and_a_waiter_is_not():
    loads = frames("npz.py:load", "loop.py:one_step")
    said = verdict([training(n) for n in range(4)], REDUCE_STACK, REDUCE_STACK, loads, REDUCE_STACK)
    assert said.rank == 2 and said.text.startswith(
        "Rank 2 has not ended step 91; ranks 0, 1 and 3 wait for it in a collective operation."
    )


LOADS = frames("queues.py:get", "dataloader.py:_try_get_data")
INSIDE = frames("hang.py:sleep", "distributed_c10d.py:all_reduce")
BACKWARD = frames("graph.py:_engine_run_backward")


@pytest.mark.parametrize(
    ("stacks", "rank"),
    [
        pytest.param((REDUCE_STACK, INSIDE), 1, id="hangs inside a collective"),
        pytest.param((REDUCE_STACK, BARRIER_STACK, REDUCE_STACK), 1, id="is in another collective"),
        pytest.param((REDUCE_STACK, BARRIER_STACK), None, id="one of two: either may be the wrong one"),
        pytest.param((BACKWARD, LOADS), 1, id="a backward pass may wait, a loader does not"),
        pytest.param((BACKWARD, BACKWARD), None, id="both may wait"),
    ],
)
def test_the_rank_that(stacks, rank):
    assert verdict([training(n) for n in range(len(stacks))], *stacks).rank == rank


GAVE_UP = {"outcome": "deadline", "note": "waited 1800 s for all 2 ranks at a barrier"}


@pytest.mark.parametrize(
    ("first", "second", "rank"),
    [
        ({}, {"step": 89}, 1),
        ({}, {"phase": "save"}, 1),
        ({"silent_s": 5.0}, {"silent_s": 9.0}, 1),
        ({"silent_s": 9.0}, {"silent_s": 9.1}, None),
        ({"phase": "save"}, {"phase": "end", "outcome": "done"}, 0),
        ({}, GAVE_UP, 0),
        ({"outcome": "done"}, {"outcome": "done"}, None),
    ],
)
def test_without_stacks_the_late_one_is_behind_or_saves_or_has_been_silent_longest(first, second, rank):
    assert verdict([training(0, **first), training(1, **second)]).rank == rank


def test_all_ranks_in_the_same_collective_point_at_the_network():
    said = verdict([training(n) for n in range(3)], *[REDUCE_STACK] * 3)
    assert said.rank is None
    assert "All 3 ranks wait in a collective operation (all_reduce) at step 91" in said.text and "NCCL" in said.advice
    assert verdict([training(0), training(1, step=89)], REDUCE_STACK, REDUCE_STACK).rank == 1, "it is a step behind"


def test_a_save_that_hangs_on_rank_0_is_not_called_collective():
    group = [training(0, phase="save"), training(1), training(2, phase="save", note=f"{WAITS} 0")]
    said = verdict(group, frames("checkpoint.py:fsync"), REDUCE_STACK, REDUCE_STACK)
    assert said.rank == 0 and "Rank 0 hangs: saving a checkpoint after step 90" in said.text
    assert verdict(group, "", REDUCE_STACK).rank == 0, "its stack is missing, and rank 2 says that it waits"


def test_a_rank_that_said_it_waits_for_a_save_can_be_the_one_that_hangs_in_the_next_step():
    group = [training(0), training(1, phase="save", note=f"{WAITS} 0"), training(2, phase="save", note=f"{WAITS} 0")]
    said = verdict(group, REDUCE_STACK, frames("npz.py:load"), REDUCE_STACK)
    assert said.rank == 1 and said.text.startswith("Rank 1 has not ended step 91; ranks 0 and 2 wait for it")


def test_a_rank_that_is_stopped_gone_or_never_started_is_named_first():
    group, stacks = [training(n) for n in range(3)], [REDUCE_STACK] * 3
    halted = verdict(group, *stacks, stopped=[101])
    assert (halted.rank, "kill -CONT 101" in halted.advice) == (1, True)
    gone = verdict([*group[:2], {**group[2], "alive": False}], *stacks)
    assert gone.rank == 2 and "is gone; it was at step 91" in gone.text
    failed = verdict([group[0], {**group[1], "outcome": "failed", "note": "ValueError: no."}, group[2]], *stacks)
    assert failed.rank == 1
    assert failed.text.startswith("Rank 1 failed at step 91: ValueError: no; ranks 0 and 2 wait for it"), failed.text
    early = [starting(n, *FLOW[:4], world=3) for n in (0, 1)]
    said = verdict([*early, *ranks.missing(early)], BARRIER_STACK, BARRIER_STACK)
    assert said.rank == 2 and said.text.startswith("Rank 2 has not started; ranks 0 and 1 wait for it in a barrier.")


def test_only_ranks_that_should_be_on_this_machine_are_missing():
    here = {"LOCAL_WORLD_SIZE": "2"}
    second_node = [starting(2, "arguments", world=4, local_rank=0, environment=here)]
    assert [r["rank"] for r in ranks.missing(second_node)] == [3]
    both_nodes = [starting(n, "arguments", host=host, environment=here) for n, host in ((0, "a"), (3, "b"))]
    assert [r["rank"] for r in ranks.missing(both_nodes)] == [1, 2]
    assert ranks.missing([]) == ranks.missing([starting(0, "arguments", world=1)]) == []


def test_a_finished_rank_is_not_waited_for_and_the_last_check_point_has_a_name():
    ended = training(0, phase="end", outcome="done", point="finished")
    last = training(1, phase="end", point="finished")
    said = verdict([ended, last], "", frames("loop.py:end_workers"))
    assert said.rank == 1 and said.text.startswith(
        "Rank 1 stopped at check point 12 (end of training); rank 0 has ended."
    )


def test_one_process_stops_at_a_check_point_too():
    said = verdict([starting(0, *FLOW[:5], world=1)], frames("wandb.py:init"))
    assert (
        said.rank == 0
        and said.text == "The training stopped at check point 8 (experiment tracker), in init (wandb.py:1)."
    )
    assert "WANDB_MODE=offline" in said.advice


def test_a_run_that_moves_is_no_accusation():
    said = verdict([training(0), training(1)], stuck=False)
    assert (said.rank, said.text) == (None, "No sign of a hang: ranks 0 and 1 at step 91.")


def test_the_text_has_the_table_the_check_points_the_stacks_and_the_environment():
    group = [starting(0, *FLOW[:7]), starting(1, *FLOW[:6]), *ranks.missing([starting(0, "data", world=3)])[1:]]
    group[1]["points"][3]["spent_s"] = 4.25
    group[0]["environment"]["NCCL_DEBUG"] = "\x1b[31mINFO\n"
    whole = ranks.Group(group, {100: BARRIER_STACK, 101: frames("models.py:load", "setup.py:build")})
    text = whole.lines(verdict(group[:2], BARRIER_STACK, frames("models.py:load")))
    assert text[0].startswith("Rank 1 stopped at check point 4")
    rows = {line[:2].strip(): line.split() for line in text if line[:2].strip().isdigit()}
    assert [len(rows), rows["7"][-3:], rows["4"][-3:]] == [12, ["1.0", "4.2*", "-"], ["1.0", ">1.0", "-"]]
    where = text.index("Rank 1: at check point 4 (base model) for 5.0 s")
    assert text[where + 1 : where + 3] == ["    load (/x/models.py:1)", "    build (/x/setup.py:1)"]
    assert "Rank 0: at check point 3 (tokenizers and text encoders) for 5.0 s, waits for the others" in text
    assert "Rank 2: did not start" in text
    assert "    device=cpu" in text and "    rank 1: RANK=1" in text and "    rank 0: RANK=0, NCCL_DEBUG=INFO" in text
    assert not any("\x1b" in line or "\n" in line for line in text)
    assert ranks.Group([{**training(0), "points": []}]).lines(verdict([training(0)])) == []


def test_a_record_becomes_a_rank_of_the_report(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    writer = Heartbeat(path_of(tmp_path, 1), rank=1, world=2)
    writer.reach("arguments")
    time.sleep(0.01)
    writer.reach("data")
    writer.describe("cpu", "gloo")
    now = platform.now()
    found = collect.rank_facts([read(path_of(tmp_path, 1))], now)
    assert [r["rank"] for r in found] == [0, 1] and found[0]["missing"]
    mine = found[1]
    assert (mine["alive"], mine["device"], mine["backend"], mine["environment"]["RANK"]) == (True, "cpu", "gloo", "1")
    first, second = mine["points"]
    assert (first["name"], second["name"], second["number"]) == ("arguments", "data", 6)
    assert first["at"][:4] == now.utc[:4] and 0.01 <= first["spent_s"] < 60 and 0 <= second["spent_s"] < 60
    group = ranks.Group(found)
    assert json.loads(json.dumps(group.as_json(group.verdict())))["verdict"]["rank"] == 0


def test_the_incident_of_a_group_holds_the_report(tmp_path):
    found = collect.of_process(scope(tmp_path, beat(0), beat(1)), 100, (), {})
    assert found.late() is None
    evidence = hang(ranks=[training(0), training(1)], processes=[proc(101, "T", trainer=True)])
    assert evidence.late()["rank"] == 1 and evidence.group().verdict().rank == 1
