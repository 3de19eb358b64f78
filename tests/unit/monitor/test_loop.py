"""What the loop does between two turns, and at the end of a run, without a training."""

import errno
import json
import math
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from monitor_evidence import beat, open_incident, saved_state
from monitor_helpers import events

from guards import step_requests
from monitor import config, loop, recovery, run_folder
from monitor.diagnose.incident import RESTARTING, Incident
from monitor.process import platform
from monitor.recovery import Interrupted
from monitor.state import Observation, RunState, Shutdown, State, Transition, is_abandoned, read_status

END = config.load().end


@pytest.mark.parametrize(
    ("state", "due_s", "phase", "pending", "activity", "poll_s"),
    [
        (State.OPENING, 0, "", False, "so far", 0.0),
        (State.STOPPING, 0, "", False, "so far", None),
        (State.QUEUED, 0, "", False, "waiting", 0.2),
        (State.BACKOFF, 0.1, "", False, "waiting", 0.105),
        (State.BACKOFF, 9, "", False, "waiting", 0.2),
        (State.BACKOFF, -1, "", True, "recovering", 0.0),
        (State.STARTING, 0, "load", False, "loading", 0.2),
        (State.STARTING, 0, "load", True, "recovering", 0.2),
        (State.RUNNING, 0, "", False, "so far", None),  # adopted, and not seen yet
        (State.RUNNING, 0, "step", True, "training", None),
        (State.SUSPECT, 0.02, "first_step", False, "training", 0.025),
        (State.RECOVERING, 0, "step", True, "recovering", 0.0),
    ],
)
def test_each_state_has_its_activity_and_pace(make_loop, monkeypatch, state, due_s, phase, pending, activity, poll_s):
    run = make_loop()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    run.state.ledger.state, run.state.ledger.pending = "so far", pending
    run.status.note_phase([beat(phase=phase)] if phase else [])
    run.view = Mock() if phase else None
    run.at = Transition(state, due_s=1000.0 + due_s)
    assert run.activity() == activity
    assert run.poll_s() == pytest.approx(run.watch.poll_s() if poll_s is None else poll_s)
    run.at = Transition(state, give_up_s=1.0)
    assert run.poll_s() == loop.UNKILLABLE_POLL_S


def test_a_process_that_cannot_be_killed_is_waited_for_and_then_named(make_loop):
    run = make_loop()
    run.at, run.state.failing, open_one = Transition(State.RECOVERING), True, open_incident(run)
    first = run.unkillable("python (7)")
    assert first.state is State.RECOVERING and first.message.startswith("cannot be killed: python (7)")
    assert first.give_up_s == pytest.approx(first.due_s + END.unkillable_s)
    assert len(events(run.folder.folder, "crash")) == 1
    run.at = first
    again = run.unkillable("python (7)")
    assert again.give_up_s == first.give_up_s and again.due_s >= first.due_s
    run.at = Transition(State.RECOVERING, give_up_s=time.monotonic() - 1)
    end = run.finish(run.unkillable("python (7)"))
    assert end.state is State.UNKILLABLE and len(events(run.folder.folder, "crash")) == 1 and run.state.failing
    assert "before it recovered: cannot be killed: python (7)" in (open_one.folder / "report.md").read_text()
    run.state.shutdown = Shutdown("preempted", gone_by_s=time.monotonic() + 5)
    assert run.unkillable("python (7)").message.startswith("preempted; cannot be killed")


@pytest.mark.parametrize(
    ("end", "failing", "outcome"),
    [
        (Transition(State.COMPLETED, "40 steps"), False, "the run completed"),
        (Transition(State.STOPPED, "stopped"), True, "the run ended before it recovered: stopped; not kept; 3 files"),
        (Transition(State.FAILED, "no", code=4), True, "gave up"),
        (Transition(State.STOPPED, "stopped"), False, "the run ended before it recovered: stopped; not kept; 3 files"),
    ],
)
def test_the_end_of_a_run_says_what_is_not_kept_and_closes_its_incident(make_loop, monkeypatch, end, failing, outcome):
    run = make_loop()
    open_incident(run).outcome = "gave up" if end.code == 4 else RESTARTING
    run.state.failing = failing
    run.view = Observation(0.0, 0.0, (beat(step=33),))
    monkeypatch.setattr(loop.checkpoints, "keep_newest", lambda run, pause: "not kept")
    monkeypatch.setattr(run, "flush_store", lambda: "3 files")
    step_requests.ask(run.folder.folder, "save")
    run.enter(end)
    reason = "40 steps; 3 files" if end.state is State.COMPLETED else f"{end.message}; not kept; 3 files"
    shown = read_status(run.folder.folder)
    assert (shown["state"], shown["reason"], shown["message"]) == (str(end.state), reason, reason)
    assert run.state.code == (end.code or (0 if end.state is State.COMPLETED else 3))
    (event,) = events(run.folder.folder, str(end.state))
    assert event["reached"] == 33 and event["message"] == reason
    saved = Incident.load(run.incident.folder)
    assert (saved.outcome, saved.recover_s is not None) == (outcome, end.state is State.COMPLETED)
    assert RunState.load(run.folder).state is end.state and not run.state.failing
    run.close()
    assert step_requests.waiting(run.folder.folder) == () and len(events(run.folder.folder, "ledger")) == 1
    assert f"the run is {end.state}" in events(run.folder.folder, "request")[0]["message"]


@pytest.mark.parametrize(
    ("signals", "stop", "shutdown", "left_s"),
    [
        ([], "", None, 900),
        ([], "{}", None, 0),
        ([], '{"pause": true}', None, 900),  # "Run now" of another run
        ([signal.SIGINT], "", None, 0),
        ([signal.SIGTERM], "", None, END.preempt_total_s),
        ([], "", Shutdown("stopped", now=True), 0),
        ([], "", Shutdown("preempted", gone_by_s=time.monotonic() + 1e6), 900),
    ],
)
def test_the_last_copy_to_the_store_has_its_time_which_a_second_stop_ends(make_loop, signals, stop, shutdown, left_s):
    run, left = make_loop('store = "s3://x"\n'), []
    assert run.flush_store() == "", "it never held the lease"
    run.store = Mock(holds=True, flush=lambda limit_s, pause: left.append(limit_s()) or "rest", summary=dict)
    run.signals, run.state.shutdown = signals, shutdown
    if stop:
        (run.folder.folder / "stop.request").write_text(stop)
    assert run.flush_store() == "rest" and not run.signals and run.folder.stop_request() is None
    assert run.at.state is State.STOPPING
    assert left[0] == pytest.approx(left_s, abs=5) if left_s else left[0] <= 0


@pytest.mark.parametrize(
    ("reachable", "shutdown", "limit_s"),
    [
        (True, None, 25),
        (False, None, 5),
        (True, Shutdown("stopped"), 5),
        (True, Shutdown("preempted", gone_by_s=0.0), 0),
    ],
)
def test_a_slow_store_has_time_to_learn_that_the_run_is_completed_where_nobody_waits(
    make_loop, reachable, shutdown, limit_s
):
    run = make_loop()
    run.store = Mock(holds=False, view=Mock(reachable=reachable), summary=dict)
    run.enter(Transition(State.COMPLETED, "40 steps"))
    run.state.shutdown = shutdown
    run.close()
    run.store.close.assert_called_once_with(limit_s)


def test_new_steps_count_give_restarts_back_and_close_the_incident(make_loop, trained, monkeypatch):
    run, restart = make_loop(), config.load().restart
    closed = []
    monkeypatch.setattr(loop.recovery, "close_incident", lambda run, view, first_new: closed.append(first_new))
    run.state.history = run.state.history.__class__(restarts=3)
    for step, after_s in ((5, 0.0), (5, 9.0), (8, 0.0), (9, restart.refund_s - 5)):
        attempt = trained(run, step=step, planned=40)
        if run.last_step_s is not None:
            run.last_step_s -= after_s
        assert run.observe(attempt).step == step
    assert closed == [1, 6, 9] and (run.state.best_step, run.state.planned) == (9, 40)
    assert run.state.history.restarts == 0 and run.state.ledger.steps == 9
    assert (run.folder.folder / "monitor.log").read_text().count("all restarts are available again") == 1


def test_a_monitor_that_fails_at_each_turn_stops_the_run_unless_it_trains(make_loop, trained, monkeypatch):
    run = make_loop()
    monkeypatch.setattr(loop, "ERROR_PAUSE_S", 0.0)
    run.at = Transition(State.RUNNING)

    def fails(step: int, waited_s: float) -> State:
        run.attempt = trained(run, step=step)
        if run.errors_since:
            run.errors_since = run.errors_since[0] - waited_s, run.errors_since[1]
        try:
            raise ZeroDivisionError("a bug")
        except ZeroDivisionError:
            run.unexpected()
        return run.at.state

    limit_s = config.load().watch.fault_s
    assert [fails(*one) for one in ((1, 0), (1, limit_s / 2), (9, limit_s), (9, 0))] == [State.RUNNING] * 4
    assert fails(9, limit_s) is State.FAILED and "cannot watch this run: ZeroDivisionError: a bug" in run.at.message
    assert len(events(run.folder.folder, "monitor_error")) == 1
    log = (run.folder.folder / "monitor.log").read_text()
    assert log.count("Traceback (most recent call last)") == 1 and "ZeroDivisionError: a bug" in log


def test_a_wait_ends_for_a_stop_once_what_an_earlier_monitor_left_is_known(make_loop):
    run = make_loop()
    run.signals = [signal.SIGTERM]
    run.pause(0.0)
    run.at = Transition(State.STARTING)
    with pytest.raises(Interrupted):
        run.pause(0.0)
    run.signals = []
    run.pause(0.0)
    (run.folder.folder / "stop.request").write_text("{}")
    with pytest.raises(Interrupted):
        run.pause(0.0)


def test_the_loop_turns_to_the_end_whatever_fails_and_then_lets_everything_go(make_loop, trained, monkeypatch, capfd):
    run, seen = make_loop(), []
    for name in ("IDLE_POLL_S", "ERROR_PAUSE_S"):
        monkeypatch.setattr(loop, name, 0.0)
    monkeypatch.setattr(loop.signal, "signal", Mock())  # this process keeps its signals
    monkeypatch.setattr(platform, "become_subreaper", adopts := Mock())
    monkeypatch.setattr(platform, "reap", reaps := Mock())
    monkeypatch.setattr(loop, "drop_copied", lambda folder: f"what was saved locally is not all in {folder}")
    results = [Transition(State.QUEUED), ZeroDivisionError("a bug"), Interrupted(), Transition(State.STARTING),
               Transition(State.STOPPING, "saving"), Transition(State.STOPPED, "at step 5")]  # fmt: skip
    run.state.shutdown, run.state.save_dir = Shutdown("stopped"), "/var/tmp"
    run.state.snapshots = str(platform.private_folder("ring", run.folder.folder))
    attempt = trained(run)
    run.attach(attempt)

    def turn(run):
        seen.append(read_status(run.folder.folder)["state"])
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    run.turn = turn
    assert run.run_until_final() == 3 and not results and adopts.called and reaps.call_count == 6
    assert seen == ["queued", "queued", "queued", "queued", "starting", "stopping"]
    assert capfd.readouterr().out.startswith("toy: ") and len(events(run.folder.folder, "monitor_error")) == 1
    assert not attempt.heartbeats.exists() and not list(run.folder.folder.glob("hangproof-ring-*"))
    saved = RunState.load(run.folder)
    assert (saved.state, saved.reason, saved.shutdown, saved.current, saved.snapshots) == (
        State.STOPPED, "at step 5", None, None, "")  # fmt: skip
    assert saved.ledger.state == "" and read_status(run.folder.folder)["state"] == "stopped"
    assert f"saved locally is not all in {run.folder.folder}\n" in (run.folder.folder / "monitor.log").read_text()


def test_a_folder_that_takes_no_status_does_not_keep_a_run_from_its_end(make_loop, monkeypatch, capfd):
    run = make_loop()
    monkeypatch.setattr(run, "listen", lambda: None)
    monkeypatch.setattr(loop, "PERSIST_S", 0.1)
    monkeypatch.setattr(loop, "drop_copied", lambda folder: pytest.fail("nothing was saved locally"))
    (run.folder.folder / "status.json").mkdir()
    run.turn = lambda run: Transition(State.COMPLETED, "40 steps")
    assert run.run_until_final() == 0 and "cannot write" in capfd.readouterr().err
    assert RunState.load(run.folder).state is State.COMPLETED
    assert "error while closing" not in (run.folder.folder / "monitor.log").read_text()


def test_a_full_disk_keeps_the_end_of_a_run_in_the_room_of_its_files(make_loop, monkeypatch):
    """Else a run that the user has stopped looked interrupted, and was continued after a reboot."""
    run = make_loop()
    monkeypatch.setattr(run, "listen", lambda: None)
    monkeypatch.setattr(loop, "ERROR_PAUSE_S", 0.0)
    run.at = Transition(State.RUNNING, "a longer message " * 10)
    assert run.state.save(run.folder) and run.write_status(force=True)
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(run_folder, "atomic_write", full)
    run.turn = lambda run: Transition(State.STOPPED, "stopped at step 5")
    assert run.run_until_final() == 3 and RunState.load(run.folder).state is State.STOPPED
    status = read_status(run.folder.folder)
    assert status["reason"] == "stopped at step 5" and not is_abandoned(status)
    assert not run.folder.replace("status.json", "x" * 99_999), "half of it would be damaged"
    assert read_status(run.folder.folder)["reason"] == "stopped at step 5"


def test_an_attempt_is_watched_from_its_beginning_with_what_earlier_ones_took(make_loop, trained):
    run, closed = make_loop(), []
    run.learned, run.state.durations = {"load": {"n": 1}, "step": {"n": 1}}, {"step": {"n": 9}}
    run.probe = SimpleNamespace(close=lambda: closed.append(1))
    run.status.note_phase([beat(phase="step")])
    run.slow_reason, run.last_step_s, run.view = "swap", 1.0, Observation(0.0, 0.0)
    run.attach(trained(run, about={"environment": {"HANGPROOF_BARRIER_TIMEOUT_S": "7300"}}))
    assert run.watch.known == {"load": {"n": 1}, "step": {"n": 9}}
    assert (run.probe, closed, run.view, run.slow_reason, run.last_step_s, run.status.phases) == (
        None, [1], None, "", None, set())  # fmt: skip
    run.on_view = lambda attempt, view: closed.append(view)
    before_s = run.config.watch.between_steps_s
    assert run.observe(run.attempt) is run.view is closed[1]
    assert run.config.watch.between_steps_s > before_s, "its script has set a limit"
    (told,) = [event for event in events(run.folder.folder, "phase") if event["step"] == 5][1:]
    assert told["message"] == "step"


GPU = {"name": "Stand-in", "utilization": 50, "memory_used": 1, "uuid": "GPU-0", "pids": [7], "spill": False, "use": {}}
GPU["bus"] = "0000:3b:00"


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the status writer's clock, which stands still, is ahead: a slow machine changes nothing."""
    ahead, m = [0.0], platform.now()
    later = lambda: replace(m, mono_s=m.mono_s + ahead[0], wall_s=m.wall_s + ahead[0])  # noqa: E731
    monkeypatch.setattr(platform, "now", later)
    return ahead


@pytest.fixture
def running(make_loop, trained, monkeypatch):
    """A run in training at step 20 of 40, on one of two GPUs."""
    run = make_loop()
    monkeypatch.setattr(run.gpus, "read", lambda: ({**GPU, "name": "other", "bus": "0000:01:00"}, GPU))
    run.queue.devices = ["1"]
    run.attempt = trained(run)
    run.attempt.tree.members = {os.getpid(): platform.process_info(os.getpid())}
    run.at, run.state.planned, run.state.resumed_step = Transition(State.RUNNING, "so far"), 40, 8
    now_s = time.monotonic()
    for step in range(12, 21):
        seen_s = now_s - 0.5 * (20 - step)
        rank = dict(beat_s=seen_s, step_s=seen_s, count=step - 8, epoch=2, done=3, total=9, note="n", pid=2**22 + 1)
        rank["intervals"] = (0.5,) * (step - 8)
        run.view = Observation(seen_s, seen_s, (beat(0, step, **rank), beat(1, step - 1, **{**rank, "rank": 1})))
        run.watch.observe(run.view)
    return run


def test_a_training_is_shown_with_its_progress_and_what_it_uses(running, clock):
    folder = running.folder.folder
    assert running.write_status(force=True)
    shown, watch = read_status(folder), running.watch
    rank = dict(phase="step", phase_done=3, phase_total=9, note="n", epoch=2, loss=0.1, trainer_pids=[2**22 + 1] * 2)
    expected = rank | dict(state="running", step=20, planned_steps=40, name="toy", folder=str(folder), message="so far")
    assert expected.items() <= shown.items()
    assert shown["step_s"] == round(watch.step_s(), 4) > 0 and shown["eta_s"] == round(20 * watch.step_s(), 1)
    moved = platform.utc(time.time() - (time.monotonic() - watch.last_progress_s()))
    assert shown["last_progress_at"][:16] == moved[:16] and "host" not in shown
    assert shown["gpus"] == [{"name": "Stand-in", "utilization": 50, "memory_used": 1}]
    assert shown["memory_bytes"] > 1 << 20 and shown["disk_free"] > 0 and shown["cpu_cores"] is None
    assert shown["monitor_pid"] == os.getpid() and shown["boot"] == platform.boot_id()[:8]
    (first, second) = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    assert (first["gpu"], second["gpu"], second["kind"]) == (0, 1, "gpu")
    assert not {"uuid", "bus", "pids", "spill", "use"} & second.keys()
    assert recovery.evidence_of(running, running.attempt, "crash").other_gpus == ["0000:01:00"]

    for waited_s, figures in ((loop.MACHINE_S - 1, "as before"), (1.5, "new")):
        clock[0] += waited_s
        sum(range(2_000_000))  # uses processor time
        running.write_status()
        assert (read_status(folder)["cpu_cores"] is None) is (figures == "as before")
    assert 0 < read_status(folder)["cpu_cores"] < 64
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2, "GPU samples are rarer"

    running.at = Transition(State.COMPLETED)
    running.view = Observation(0.0, 0.0, (beat(0, 40, loss=math.nan),))
    clock[0] += loop.GPU_S
    running.write_status(force=True)
    ended = read_status(folder)
    gone = ("phase", "eta_s", "pid", "loss", "cpu_cores", "memory_bytes", "lora", "slow", "store", "checkpoint")
    assert [ended[key] for key in gone] == [None] * len(gone) and ended["trainer_pids"] == []
    assert (ended["step"], ended["phase_done"], ended["phase_total"], ended["note"]) == (40, 0, 0, "")
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_training_that_resumes_is_shown_with_the_loss_and_the_epoch_of_the_step_before(running):
    """Also by a new monitor. At the end of the run no step follows."""
    running.write_status()
    running.view = Observation(0.0, 0.0, (beat(0, 0, count=0, loss=math.nan),))
    for resumed_step, status, known in (
        (8, running.status, (2, 0.1)),
        (8, loop.StatusWriter(running, None), (2, 0.1)),
        (0, running.status, (0, None)),
    ):
        running.state.resumed_step = resumed_step
        status.write(force=True)
        shown = read_status(running.folder.folder)
        assert (shown["step"], shown["epoch"], shown["loss"]) == (resumed_step, *known)


def test_a_run_that_has_not_begun_shows_where_it_resumes(make_loop):
    run = make_loop('store = "s3://x"\nnodes = 2\n', machine=0)
    run.state.resumed_step = 8
    assert run.write_status(force=True)
    shown = read_status(run.folder.folder)
    assert (shown["state"], shown["step"], shown["epoch"], shown["loss"]) == ("queued", 8, 0, None)
    assert shown["host"] and shown["machines"] == [] and shown["store"]["address"] == "s3://x"
    assert shown["last_progress_at"] is None and shown["step_s"] is None and shown["cpu_cores"] is None
    run.state.best_step = 12
    run.write_status(force=True)
    assert read_status(run.folder.folder)["step"] == 12


def test_an_activity_begins_at_once_and_all_else_waits_for_the_next_status(running, monkeypatch):
    touched = []
    monkeypatch.setattr(loop.checkpoints, "touch_memory", touched.append)
    running.write_status(force=True)
    assert running.state.ledger.state == "loading"
    began_s = running.state.ledger.mono_s
    running.write_status()
    assert running.state.ledger.mono_s == began_s
    running.status.note_phase([beat(phase="step")])
    running.write_status()
    assert running.state.ledger.state == "training" and running.state.ledger.mono_s > began_s
    assert read_status(running.folder.folder)["ledger"]["state"] == "loading" and len(touched) == 1


def test_a_new_checkpoint_is_shown_and_told_once_and_one_without_its_guard_file_is_not(running, clock):
    run, folder = running, running.folder.folder
    (folder / "toy-step00000030-state").mkdir()
    assert run.write_status(force=True)
    first = read_status(folder)
    assert first["checkpoint"] is None
    state = saved_state(folder, 20)
    clock[0] += 0.1  # far below a second, which a busy machine needs for the lines above
    assert run.write_status()
    assert read_status(folder)["updated_mono_s"] == first["updated_mono_s"], "not that soon again"
    clock[0] += 1.0
    run.write_status()
    assert read_status(folder)["updated_mono_s"] > first["updated_mono_s"]
    assert read_status(folder)["checkpoint"] is None and not (folder / "monitor.json").exists()
    clock[0] += loop.CHECKPOINTS_S
    for _ in range(2):
        run.write_status()
        clock[0] += 2 * loop.CHECKPOINTS_S
    assert read_status(folder)["checkpoint"] == {"path": str(state), "step": 20}
    assert [(told["step"], told["path"]) for told in events(folder, "checkpoint")] == [(20, str(state))]
    assert RunState.load(run.folder).planned == 40, "saved with its ledger"
    run.state.save_dir = str(folder.parent / "local")
    newer = saved_state(folder.parent / "local", 30)
    run.write_status(force=True)
    assert read_status(folder)["checkpoint"] == {"path": str(newer), "step": 30}, "a start resumes from it"
    (folder / "status.json").unlink()
    (folder / "status.json").mkdir()
    assert not run.write_status(force=True)
    (folder / "status.json").rmdir()
    (folder / "monitor.json").unlink()
    (folder / "monitor.json").mkdir()
    run.state.restarts = 3
    assert not run.state.save(run.folder)
    (folder / "monitor.json").rmdir()
    run.state.restarts = 4  # under way: not committed
    run.write_status(force=True)
    assert RunState.load(run.folder).restarts == 3, "what the disk refused is saved with the next status"


def test_each_phase_of_an_attempt_is_told_once(make_loop):
    run = make_loop()
    status = run.status
    status.note_phase([])
    for phase, total in (("load", 0), ("load", 0), ("cache_latents", 9), ("step", 0), ("load", 0)):
        status.note_phase([beat(phase=phase, total=total)])
    status.phases.clear()
    status.note_phase([beat(phase="load", step=3)])
    assert status.phases == {"load"}
    told = [(event["message"], event["step"]) for event in events(run.folder.folder, "phase")]
    assert told == [("load", 5), ("cache_latents, 9 items", 5), ("step", 5), ("load", 3)]
