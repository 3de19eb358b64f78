"""How a recovery answers a failure: what it records, changes, and when it ends the run, on real folders."""

import time
from dataclasses import replace

import pytest
from monitor_evidence import LORA, beat, crash, hang, saved_state
from monitor_helpers import events

from monitor import config, recovery
from monitor.diagnose.incident import RESTARTING, Incident
from monitor.resume import next_attempt
from monitor.state import History, Observation, RunState, State, Transition
from monitor.supervisor import turn


def fail(loop, attempt, **values):
    """Recover from a crash whose last progress was 5 s ago."""
    log = values.pop("log", "something broke")
    return recover(loop, attempt, crash(**{"log": log, "outcome": "failed", "ended": "exit code 1", **values}))


def recover(loop, attempt, evidence):
    """Recover from this failure, whose last progress was 5 s ago."""
    loop.at = recovery.open_incident(loop, attempt, evidence, time.monotonic() - 5)
    assert loop.at.state is State.RECOVERING and RunState.load(loop.folder).failing
    return recovery.recover(loop, attempt, loop.incident)


def test_a_crash_is_recorded_answered_at_once_and_the_third_ends_the_run(make_loop, trained):
    loop = make_loop()
    folder, state = loop.folder.folder, loop.state
    state.best_step, state.current = 10, trained(loop).record
    for number in (1, 2, 3):
        attempt = trained(loop)
        result = fail(loop, attempt)
        assert not state.failing and state.current is None and not attempt.heartbeats.exists()
        if number < 3:
            assert result.state is State.BACKOFF and state.restarts == number
            wait_s = result.due_s - time.monotonic()
            assert wait_s <= 0 if number == 1 else 0 < wait_s <= config.load(environ={}).restart.backoff_first_s
    assert result.state is State.FAILED and result.code == 4 and state.restarts == 2
    assert "Gave up: the same failure 3 times" in result.message and "incidents/0003/report.md" in result.message
    title = loop.incident.cause.title
    assert loop.at.message == "training, step 10: exit code 1" and result.message.startswith(title)
    assert state.cause_counts == {loop.incident.cause.name: 3} and state.ledger.failures == 3
    assert RunState.load(loop.folder) == state
    first, second, third = (Incident.load(folder / "incidents" / f"000{n}") for n in (1, 2, 3))
    assert first.outcome == second.outcome == "the restart after it failed as well"
    assert third.outcome.startswith("the run gave up: the same failure 3 times") and third.best_step == 10
    assert 5 <= third.detect_s < 60
    assert events(folder, "crash")[0]["since_s"] == round(first.detect_s, 3)
    assert [event["message"] for event in events(folder, "backoff")] == ["restarting in 10 s"]
    last = (folder / "training.log").read_text().splitlines()[-1]
    assert last.startswith("=== ") and f"stopped: {title}" in last
    assert events(folder, "crash")[0]["message"] == f"{title}: training, step 10: exit code 1"


def test_a_cause_that_no_restart_removes_ends_the_run_at_once_with_what_to_do(make_loop, trained):
    loop = make_loop()
    saved_state(loop.folder.folder, 8)
    result = fail(loop, trained(loop), exit_code=2, log="train.py: error: no such option: --x")
    cause = loop.incident.cause
    assert not cause.restart and result == Transition(State.FAILED, result.message)
    why = f"{cause.title}. {cause.explanation} {cause.advice} Gave up: a restart cannot help."
    assert result.message == f"{why} See incidents/0001/report.md"
    assert "toy-step00000008-state is kept, and a new start resumes from it" in loop.incident.outcome


@pytest.mark.parametrize(("best_step", "state"), [(0, State.FAILED), (10, State.BACKOFF)])
def test_a_file_that_an_earlier_attempt_found_may_come_back(best_step, state, make_loop, trained):
    loop = make_loop()
    loop.state.best_step = best_step
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/nas/flux1-dev.safetensors'"
    assert fail(loop, trained(loop), phase="load", exit_code=1, log=error).state is state
    assert loop.incident.cause.name == "file_missing" and "/nas/flux1-dev" in loop.incident.cause.explanation


def test_the_second_failure_of_a_cause_changes_something(make_loop, trained, monkeypatch):
    """At the first where it is certain to return; the subprocess that knows the changes is replaced."""
    change = {"name": "workers_0", "sentence": "no workers", "patch": {"spec": {"workers": 0}, "flags": 1}}
    asked = []
    monkeypatch.setattr(next_attempt, "next_change", lambda folder, ladder, keeps: asked.append(ladder) or change)
    loop = make_loop()
    oom = "CUDA out of memory. Tried to allocate 2.00 GiB"
    fail(loop, trained(loop), log=oom)
    assert asked == [loop.incident.cause.ladder] and loop.state.changes == [change]
    assert loop.incident.changed == ["no workers"]
    (event,) = events(loop.folder.folder, "mitigated")
    assert event["patch"] == {"flags": 1} and event["change"] == "workers_0"
    late = "loss is nan"
    for _ in range(2):
        fail(loop, trained(loop), log=late, note=late, outcome="failed")
    assert "nan" in loop.incident.cause.name and not loop.incident.cause.at_once
    assert len(asked) == 2, "not at its first failure"
    other = make_loop("nodes = 2\n", machine=1)
    result = fail(other, trained(other), log=oom)
    message = f"{other.incident.cause.title}; restarting in 5 s with all machines"
    assert result == Transition(State.PREEMPTED, message, code=6)
    assert len(asked) == 2, "what changes is decided on the first machine"


def test_kills_from_outside_turn_no_samples_off_unless_the_run_would_end(make_loop, trained, monkeypatch):
    change = {"name": "sampling_off", "sentence": "no samples", "patch": {}}
    monkeypatch.setattr(next_attempt, "next_change", lambda run, ladder, keeps: change)
    loop = make_loop()
    for step in (10, 20, 30, 30, 30):
        if step > loop.state.best_step:
            loop.state.history, loop.state.best_step = History(), step
        assert loop.state.changes == [], "the cause is not in the sampling"
        evidence = replace(crash(phase="sample", signal=9), step=step)
        assert recover(loop, trained(loop), evidence).state is State.BACKOFF
    assert loop.state.changes == [change]


@pytest.mark.parametrize(
    ("steps", "history", "keeps"),
    [
        (0, History(), False),
        (2000, History(), True),
        (2000, History(restarts=2), True),
        (2000, History(restarts=3), False),
        (2000, History(1, {"step/2000/host_out_of_memory": 1}), False),
    ],
)
def test_no_change_costs_the_steps_so_far_while_restarts_bring_new_ones(
    make_loop, trained, monkeypatch, steps, history, keeps
):
    asked = []
    monkeypatch.setattr(next_attempt, "next_change", lambda run, ladder, keeps: asked.append(keeps) or {})
    loop = make_loop()
    loop.state.best_step, loop.state.history = steps, history
    fail(loop, trained(loop), log="CUDA out of memory. Tried to allocate 2.00 GiB")
    assert asked == [keeps]


def test_a_training_that_had_finished_is_not_restarted(make_loop, trained):
    loop = make_loop()
    lora = loop.folder.folder / "toy.safetensors"
    lora.write_bytes(LORA)
    done = dict(outcome="done", step=40, planned=40)
    assert recover(loop, trained(loop, **done), hang()) == Transition(State.COMPLETED)
    assert "was complete" in loop.incident.outcome and loop.state.restarts == 0
    lora.unlink()
    assert recover(loop, trained(loop, **done), hang()).state is State.BACKOFF, "without a LoRA"
    assert "is missing; the last checkpoint is used" in (loop.folder.folder / "monitor.log").read_text()


def test_the_first_new_step_closes_the_incident_at_its_own_time(make_loop, trained):
    loop = make_loop()
    loop.state.best_step = 10
    now_s = time.monotonic()
    fail(loop, trained(loop))
    loop.incident.progress_s, loop.incident.resumed_from, number = now_s - 100, 8, loop.incident.folder
    beats = (beat(0, 9), beat(1, 13, step_s=now_s - 2, intervals=(9.0, 3.0, 4.0)))
    recovery.close_incident(loop, Observation(now_s, 0.0, beats), 11)
    closed = Incident.load(number)
    assert closed.recover_s == pytest.approx(98 - 7) and closed.steps_repeated == 2
    assert closed.outcome == "the run recovered: step 11 is new"
    assert loop.incident is None and RunState.load(loop.folder).incident == ""
    (event,) = events(loop.folder.folder, "progress")
    assert event["message"] == "step 11 is new: recovered in 91.0 s, 2 steps trained twice"
    recovery.close_incident(loop, Observation(now_s, 0.0, beats), 11)
    assert len(events(loop.folder.folder, "progress")) == 1
    fail(loop, trained(loop))
    loop.incident.resumed_from, number = 12, loop.incident.folder  # a full disk did not keep that the run was there
    recovery.close_incident(loop, Observation(now_s, 0.0, beats), 13)
    assert Incident.load(number).steps_repeated == 0


def test_a_training_that_went_on_while_no_monitor_was_there_to_answer_its_failure_is_left_alone(make_loop, trained):
    """The next monitor failed at every turn, and then stopped the run with that reason."""
    loop = make_loop()
    recovery.open_incident(loop, trained(loop), hang(), time.monotonic() - 5)
    loop.at, loop.attempt, loop.state.best_step = Transition(State.RECOVERING), trained(loop, step=12), 11
    assert turn(loop) == Transition(State.RUNNING) and loop.attempt.heartbeats.exists()
    assert not loop.state.failing and loop.incident is None
    assert (
        "recovered in" in (said := events(loop.folder.folder, "progress")[0]["message"]) and "0 steps trained" in said
    )


def test_the_next_monitor_takes_up_an_open_incident(make_loop, trained):
    loop = make_loop()
    fail(loop, trained(loop))
    number = loop.state.incident
    for failing, recover_s, open_again in ((True, 3.0, True), (False, None, True), (False, 3.0, False)):
        loop.incident.recover_s = recover_s
        loop.incident.close(loop.folder, "a process could not be killed")
        again = make_loop()
        again.state.failing = failing
        recovery.load_incident(again)
        assert (again.incident is not None) is open_again and again.state.failing is failing
        assert not failing or again.incident.outcome == RESTARTING
    (loop.incident.folder / "incident.json").write_text("{")
    again.state.failing, again.state.incident = True, number
    recovery.load_incident(again)
    assert again.incident is None and not again.state.failing and again.state.incident == ""
    assert "cannot be continued" in (loop.folder.folder / "monitor.log").read_text()
