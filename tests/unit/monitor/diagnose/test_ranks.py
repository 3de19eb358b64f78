"""The rank report as a pure function: which rank is stuck, where, and the text that says so."""

import json
import time

import pytest
from monitor_evidence import attempt, beat, frames, hang, known, proc

from guards.heartbeat import POINTS, WAITS, Heartbeat, path_of, read
from monitor.diagnose import causes, ranks
from monitor.process import platform
from monitor.state import ExitStatus, Verdict

BARRIER_STACK = frames("distributed_c10d.py:barrier", "state.py:wait_for_everyone", "setup.py:barrier")
REDUCE_STACK = frames("distributed_c10d.py:all_reduce", "operations.py:reduce", "loop.py:average")
FLOW = ("arguments", "folders", "data", "accelerator", "tracker", "model", "tokenizer", "network", "loader", "ready")


def starting(number: int, *passed: str, world: int = 4, **values) -> dict:
    """A rank that has reached these check points, one second each, and stays in the last."""
    points = [
        {"number": POINTS.index(name) + 1, "name": name, "at": f"2026-01-02T03:04:{i:02d}.000Z", "elapsed_s": float(i),
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
    return starting(number, *POINTS[:11], step=step, count=step, phase="step") | values


def verdict(group: list[dict], *stacks: str, stopped=(), **more):
    """The verdict on ranks with these stacks, in the order of their numbers; "" is a missing one."""
    return ranks.Group(group, {100 + n: text for n, text in enumerate(stacks) if text}, stopped).verdict(**more)


LOADS = frames("queues.py:get", "dataloader.py:_try_get_data")
INSIDE = frames("hang.py:sleep", "distributed_c10d.py:all_reduce")
BACKWARD = frames("graph.py:_engine_run_backward")
GAVE_UP = {"outcome": "deadline", "note": "waited 1800 s for all 2 ranks at a barrier"}
THREE, EARLY = [training(n) for n in range(3)], [starting(n, *FLOW[:4], world=3) for n in (0, 1)]
SAVING = [training(0, phase="save"), training(1), training(2, phase="save", note=f"{WAITS} 0")]
NOTES = [training(0), *(training(n, phase="save", note=f"{WAITS} 0") for n in (1, 2))]
ENDED = [training(0, phase="end", outcome="done", point="finished"), training(1, phase="end", point="finished")]
WAIT = (REDUCE_STACK,) * 3


def two(first: dict, second: dict) -> list[dict]:
    return [training(0, **first), training(1, **second)]


# The ranks, their stacks, the one that is named, the beginning of the verdict, and a part of its advice.
VERDICTS = {
    "one never reached a check point": (
        [starting(n, *FLOW[: 6 if n == 1 else 7]) for n in range(4)],
        (BARRIER_STACK, frames("models.py:load", "setup.py:build"), BARRIER_STACK, BARRIER_STACK), 1,
        "Rank 1 stopped at check point 4 (base model) and never reached the next one, 3 (tokenizers and text encoders), while "
        "ranks 0, 2 and 3 wait for it in a barrier. It is in load (models.py:1).", "disk"),
    "the same without stacks": ([starting(n, *FLOW[: (8, 8, 5)[n]]) for n in range(3)], (), 2, "Rank 2 stopped", ""),
    "all at one check point": (
        [starting(n, *FLOW[:9]) for n in range(4)], (frames("loader.py:read"),) * 4, None,
        "All 4 ranks stopped at check point 9 (data loader and optimizer).", ranks.ADVICE["loader"]),
    "one has not ended a step": (
        [training(n) for n in range(4)], (REDUCE_STACK, REDUCE_STACK, frames("npz.py:load", "loop.py:one_step"), REDUCE_STACK),
        2, "Rank 2 has not ended step 91; ranks 0, 1 and 3 wait for it in a collective operation.", "batch"),
    "hangs inside a collective": (THREE[:2], (REDUCE_STACK, INSIDE), 1, "", ""),
    "is in another collective": (THREE, (REDUCE_STACK, BARRIER_STACK, REDUCE_STACK), 1, "", ""),
    "one of two: either may be the wrong one": (THREE[:2], (REDUCE_STACK, BARRIER_STACK), None, "", ""),
    "a backward pass may wait, a loader does not": (THREE[:2], (BACKWARD, LOADS), 1, "", ""),
    "both may wait": (THREE[:2], (BACKWARD, BACKWARD), None, "", ""),
    "a step behind": (two({}, {"step": 89}), (), 1, "", ""),
    "a step behind, and it waits": (two({}, {"step": 89}), WAIT[:2], 1, "", ""),
    "saves while the other trains": (two({}, {"phase": "save"}), (), 1, "", ""),
    "silent for longest": (two({"silent_s": 5.0}, {"silent_s": 9.0}), (), 1, "", ""),
    "silent for as long": (two({"silent_s": 9.0}, {"silent_s": 9.1}), (), None, "", ""),
    "the other is done": (two({"phase": "save"}, {"phase": "end", "outcome": "done"}), (), 0, "", ""),
    "the other gave up": (two({}, GAVE_UP), (), 0, "", ""),
    "both are done": (two({"outcome": "done"}, {"outcome": "done"}), (), None, "", ""),
    "all in the same collective": (
        THREE, WAIT, None, "All 3 ranks wait in a collective operation (all_reduce) at step 91, and none", "NCCL"),
    "a save that hangs is not called collective": (
        SAVING, (frames("checkpoint.py:fsync"), REDUCE_STACK, REDUCE_STACK), 0,
        "Rank 0 hangs: saving a checkpoint after step 90", ""),
    "the same without its stack, and rank 2 says that it waits": (SAVING, ("", REDUCE_STACK), 0, "Rank 0 hangs", ""),
    "it said that it waits for a save, and hangs in the next step": (
        NOTES, (REDUCE_STACK, frames("npz.py:load"), REDUCE_STACK), 1,
        "Rank 1 has not ended step 91; ranks 0 and 2 wait for it", ""),
    "is gone": (
        [*THREE[:2], {**THREE[2], "alive": False}], WAIT, 2,
        "The process of rank 2 (pid 102) is gone; it was at step 91; ranks 0 and 1", "kernel's log"),
    "failed": (
        [THREE[0], {**THREE[1], "outcome": "failed", "note": "ValueError: no."}, THREE[2]], WAIT, 1,
        "Rank 1 failed at step 91: ValueError: no; ranks 0 and 2 wait for it", ""),
    "never started": (
        [*EARLY, *ranks.missing(EARLY)], (BARRIER_STACK, BARRIER_STACK), 2,
        "Rank 2 has not started; ranks 0 and 1 wait for it in a barrier.", "launcher"),
    "the other has finished": (
        ENDED, ("", frames("loop.py:end_workers")), 1,
        "Rank 1 stopped at check point 12 (end of training); rank 0 has ended.", "tracker"),
    "one process": (
        [starting(0, *FLOW[:5], world=1)], (frames("wandb.py:init"),), 0,
        "The training stopped at check point 8 (experiment tracker), in init (wandb.py:1).", "WANDB_MODE=offline"),
}  # fmt: skip


@pytest.mark.parametrize("what", VERDICTS)
def test_the_verdict_where(what):
    group, stacks, rank, text, advice = VERDICTS[what]
    said = verdict(group, *stacks)
    assert said.rank == rank and said.text.startswith(text) and advice in said.advice, said


def test_a_rank_that_a_signal_has_stopped_is_named_and_a_run_that_moves_is_no_accusation(tmp_path):
    halted = verdict(THREE, *WAIT, stopped=[101])
    assert halted.rank == 1 and "kill -CONT 101" in halted.advice
    evidence = hang(ranks=[training(0), training(1)], processes=[proc(101, "T", trainer=True)])
    assert evidence.late()["rank"] == evidence.group().verdict().rank == 1
    moves = verdict(THREE[:2], stuck=False)
    assert (moves.rank, moves.text) == (None, "No sign of a hang: ranks 0 and 1 at step 91.")
    both, status = attempt(tmp_path, beat(0), beat(1)), ExitStatus(None, None, "running", "", trained=False)
    assert causes.of_hang(known("hang"), both, Verdict("hung"), status, {}, "").late() is None


def test_only_ranks_that_should_be_on_this_machine_are_missing():
    here = {"LOCAL_WORLD_SIZE": "2"}
    second_node = [starting(2, "arguments", world=4, local_rank=0, environment=here)]
    assert [r["rank"] for r in ranks.missing(second_node)] == [3]
    assert ranks.missing([]) == ranks.missing([starting(0, "arguments", world=1)]) == []


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
    assert any(line.split()[-6:] == ["rank", "0", "rank", "1", "rank", "2"] for line in text)
    assert text[text.index("    device=cpu") - 2] == "Environment of all ranks:" and "    backend=gloo" in text
    assert "    rank 1: RANK=1" in text and "    rank 0: RANK=0, NCCL_DEBUG=INFO" in text
    assert not any("\x1b" in line or "\n" in line for line in text)
    assert ranks.environment(group[:1])[0] == "Environment:" and ranks.environment([]) == []
    assert ranks.Group([{**training(0), "points": []}]).lines(verdict([training(0)])) == []


def test_a_record_becomes_a_rank_of_the_report(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    writer = Heartbeat(path_of(tmp_path, 1), rank=1, world=2)
    writer.reach("arguments")
    time.sleep(0.01)
    writer.reach("data")
    writer.describe("cpu", "gloo")
    now = platform.now()
    found = ranks.records([read(path_of(tmp_path, 1))], now)
    assert [r["rank"] for r in found] == [0, 1] and found[0]["missing"]
    mine = found[1]
    assert (mine["alive"], mine["device"], mine["backend"], mine["environment"]["RANK"]) == (True, "cpu", "gloo", "1")
    first, second = mine["points"]
    assert (first["name"], second["name"], second["number"]) == ("arguments", "data", 6)
    assert first["at"][:4] == now.utc[:4] and 0.01 <= first["spent_s"] < 60 and 0 <= second["spent_s"] < 60
    assert ranks.Group(json.loads(json.dumps(found))).verdict().rank == 0
