"""Each state has a function and each request its answer; a toy trainer hangs and dies (tests/campaigns/faults.toml: all)."""

import errno
import os
import signal
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from monitor_evidence import beat, saved_state
from monitor_helpers import events, supervise, toy_run
from run_facts import completed, incidents, report, status
from toys import AT, HANG, SHORT, fault_at

from monitor import config, recovery, state, supervisor
from monitor.ledger import Ledger
from monitor.loop import Loop
from monitor.process import platform
from monitor.process.platform import LOCK, is_held
from monitor.process.spawned import KillResult
from monitor.resume.next_attempt import CHECKED, START, UNCHECKED
from monitor.run_folder import MonitorError
from monitor.state import ExitStatus, Observation, RunState, Shutdown, Signals, State, Transition, Verdict, spec_hash
from monitor.store import LeaseState, StoreView
from monitor.supervisor import STATES, handle_requests, turn


@pytest.mark.slow
def test_an_undisturbed_run_completes_with_exit_code_0_and_no_incident(folder):
    toy_run(folder, **SHORT)
    note = "the tracker did not finish: waited 30 s for wandb to finish"
    text = (folder / "toy.py").read_text()
    (folder / "toy.py").write_text(text.replace('hb.end("done")', f'hb.end("done", "{note}")'))
    assert supervise(folder)[0] == 0
    now = completed(folder)
    assert now["reason"].endswith(f"LoRA: toy.safetensors; {note}"), "with what the training reported"
    assert now["planned_steps"] == 50 and now["checkpoint"]["step"] == 50 and now["incidents"] == 0
    assert now["lora"] == str(folder / "toy.safetensors")
    assert incidents(folder) == []
    assert events(folder)[0]["kind"] == "started"
    assert not list((folder.parent / "tmp").glob("hangproof-toy-*")), "heartbeats are removed at the end"


@pytest.mark.slow
@pytest.mark.journey
def test_a_step_that_hangs_is_found_ended_and_resumed_with_the_result_of_a_calm_run(folder):
    """test_recovery.py has one that is stopped."""
    toy_run(folder, HANG, **SHORT)
    code, output, _ = supervise(folder)
    assert code == 0
    completed(folder, restarts=1)
    (incident,) = incidents(folder)
    assert incident["kind"] == "hang" and incident["phase"] == "step" and incident["step"] == AT
    assert incident["resumed_from"] == 30 and incident["steps_repeated"] == AT - 30
    assert incident["recover_s"] > incident["detect_s"]
    assert incident["cause"] == "stuck"
    (event,), found = events(folder, "ledger"), Ledger.of(status(folder))
    assert f"toy: {event['message']}" in output.splitlines()
    assert (found.steps, found.repeated, found.failures, found.recovered) == (50, AT - 30, 1, 1)
    assert found.seconds["lost"] >= incident["detect_s"] and found.seconds["recovering"] > 0
    text = report(folder)
    assert f"step {AT} of 50" in text and "checkpoint of step 30" in text and "## Cost" in text
    assert "fault" in (folder / "incidents/0001/stacks.txt").read_text()


@pytest.mark.slow
@pytest.mark.journey
def test_a_death_by_sigkill_is_a_crash_even_below_a_living_launcher(folder):
    toy_run(folder, fault_at(AT, "os.kill(os.getpid(), 9)"), **SHORT)
    (folder / "train.sh").write_text(f"cd {folder}\n{sys.executable} toy.py || sleep 3600\n")
    assert supervise(folder, limits="[watch]\nlauncher_s = 1\n")[0] == 0
    completed(folder, restarts=1)
    (incident,) = incidents(folder)
    assert incident["kind"] == "crash"


@pytest.mark.slow
def test_a_script_without_heartbeats_is_watched_by_its_log(folder):
    folder.mkdir()
    (folder / "train.sh").write_text(
        'for i in 1 2 3; do echo "line $i of attempt $HANGPROOF_ATTEMPT"; sleep 0.3; done\n'
        '[ "$HANGPROOF_ATTEMPT" = 1 ] && sleep 3600\necho done\n'
    )
    assert supervise(folder, limits="[watch]\nlog_silence_s = 2\n")[0] == 0
    now = status(folder)
    assert now["state"] == "completed" and now["restarts"] == 1
    (incident,) = incidents(folder)
    assert incident["kind"] == "hang" and incident["detect_s"] >= 2
    assert "line 3 of attempt 1" in (folder / "incidents/0001/log_tail.txt").read_text()


END, SAVING = config.load().end, "saving a checkpoint"
TERM, INT = signal.SIGTERM, signal.SIGINT


def test_every_state_that_is_not_final_has_a_function():
    """An ending without a name once made the loop spin for ever with the GPU held."""
    assert set(STATES) == set(State) - state.FINAL


@pytest.mark.parametrize(
    ("before", "signals", "request_", "after", "hurried"),
    [
        (None, [INT], None, ("stopped", False), False),
        (None, [], "{}", ("stopped", False), False),
        (None, [], '{"now": true}', ("stopped", True), False),
        (None, [], '{"pause": true}', ("paused", False), False),
        (None, [INT], '{"pause": true}', ("stopped", False), False),
        (None, [TERM], None, ("preempted", False), True),
        (None, [TERM, INT], None, ("stopped", False), True),
        ("stopped", [], "{}", ("stopped", True), False),
        ("stopped", [TERM], None, ("stopped", False), True),
        ("preempted", [], '{"pause": true}', ("preempted", False), False),
        ("preempted", [], "{}", ("stopped", False), False),
        ("changed", [TERM], None, ("preempted", False), True),
        ("changed", [], None, ("changed", False), None),
    ],
)
def test_each_request_ends_the_run_in_its_way(make_loop, trained, before, signals, request_, after, hurried):
    run = make_loop()
    run.at = Transition(State.RUNNING)
    run.attempt, run.signals = trained(run, count=0), list(signals)
    run.state.shutdown = Shutdown(before) if before else None
    if request_:
        (run.folder.folder / "stop.request").write_text(request_)
    result = handle_requests(run)
    shutdown = run.state.shutdown
    assert (shutdown.ending, shutdown.now) == after
    assert not run.signals and run.folder.stop_request() is None
    assert (result is None) is (hurried is None)
    if result is not None:
        assert result.state is State.STOPPING and result.due_s - time.monotonic() <= supervisor.NO_STEP_SAVE_S
        assert (shutdown.gone_by_s is not None) is hurried
        run.at, run.signals = result, [TERM] * hurried
        assert handle_requests(run) is None, "it is known"
        run.at, run.signals = Transition(State.OPENING), [INT]
        assert handle_requests(run) is None and run.signals, "what was left is not known yet"


@pytest.mark.parametrize(
    ("shutdown", "count", "save_s", "message"),
    [
        (Shutdown("stopped"), 3, END.stop_save_s, f"{SAVING}, then stopping"),
        (Shutdown("stopped"), 0, supervisor.NO_STEP_SAVE_S, f"{SAVING}, then stopping"),
        (Shutdown("stopped", now=True), 3, 0, f"{SAVING}, then stopping"),
        (Shutdown("paused"), 3, END.stop_save_s, f"{SAVING}, then pausing"),
        (Shutdown("changed"), 3, END.stop_save_s, f"{SAVING}, then restarting"),
        (Shutdown("spent"), 3, END.stop_save_s, f"the spend limit is reached: {SAVING}, then stopping"),
        (Shutdown("preempted", gone_by_s=1e9), 3, END.preempt_save_s, f"the machine is needed: {SAVING}"),
        (Shutdown("preempted", gone_by_s=1.0), 3, 0, f"the machine is needed: {SAVING}"),
    ],
)
def test_a_stop_waits_for_a_checkpoint(make_loop, trained, monkeypatch, shutdown, count, save_s, message):
    run = make_loop()
    run.at, run.attempt = Transition(State.RUNNING), trained(run, count=count)
    saved = []  # when the training is asked
    monkeypatch.setattr(run.attempt, "request_stop", lambda: saved.append(RunState.load(run.folder).shutdown) or True)
    stopping = supervisor.shut_down(run, shutdown)
    assert saved == [shutdown], "a monitor that is killed now leaves a training that stops, and it is known why"
    assert stopping.state is State.STOPPING and stopping.message == message
    assert stopping.due_s - time.monotonic() == pytest.approx(save_s, abs=1)
    (event,) = events(run.folder.folder, "stopping")
    assert event["message"] == message and run.state.shutdown is shutdown
    monkeypatch.setattr(run.attempt, "request_stop", lambda: False)  # no rank can be asked
    assert supervisor.shut_down(run, shutdown).due_s - time.monotonic() <= supervisor.NO_STEP_SAVE_S
    run.at = Transition(State.RECOVERING)
    assert supervisor.shut_down(run, shutdown).message == "stopping the recovery"
    run.attempt = None
    assert supervisor.shut_down(run, shutdown).state is not State.STOPPING


def test_a_stopped_run_says_where_and_with_which_checkpoint(make_loop, trained):
    run = make_loop("price_per_hour = 1\nspend_limit = 2\n")
    run.state.best_step = 20
    assert supervisor.after_stop(run) == Transition(State.STOPPED, "stopped at step 20, without a checkpoint")
    saved_state(run.folder.folder, 20)
    where = "at step 20; checkpoint: toy-step00000020-state"
    run.state.shutdown = Shutdown("paused")
    assert supervisor.after_stop(run) == Transition(State.PAUSED, f"paused {where}")
    run.state.shutdown = Shutdown("spent")
    spent = f"the spend limit was reached. Stopped {where}"
    assert supervisor.after_stop(run) == Transition(State.FAILED, spent, code=4)
    run.state.shutdown, run.attempt = Shutdown("changed"), trained(run)
    heartbeats = run.attempt.heartbeats
    assert supervisor.after_stop(run).state is State.BACKOFF and not heartbeats.exists()
    assert run.attempt is run.state.shutdown is run.state.current is None
    run.at = Transition(State.RUNNING)
    run.state.ledger.seconds["training"] = 3 * 3600.0
    assert supervisor.spent(run) and run.state.shutdown == Shutdown("spent")
    run.at = Transition(State.STOPPING)
    assert supervisor.spent(run) is None, "it ends already"
    run.state.shutdown, run.at = None, Transition(State.QUEUED)  # the user starts it again, with the same limit
    again = turn(run)
    assert (again.state, again.code) == (State.FAILED, 4)
    assert again.message.startswith("the spend limit of 2 is reached")


def test_a_stop_waits_for_the_checkpoint_until_its_deadline_or_a_hang(make_loop, trained, monkeypatch):
    run, view = make_loop(), Observation(time.monotonic(), 0.0, (beat(),))
    run.attempt, killed = trained(run, outcome="stopped"), []
    result = KillResult((), (), 0.0)
    monkeypatch.setattr(run, "observe", lambda attempt, fresh=False: view)
    monkeypatch.setattr(supervisor, "kill_processes", lambda run, attempt, times_s: killed.append(times_s) or result)
    run.at = waits = Transition(State.STOPPING, "saving", time.monotonic() + 99)
    for verdict, ended in (("ok", False), ("suspect", False), ("slow", True), ("hung", True), ("over", True)):
        monkeypatch.setattr(run.watch, "observe", lambda seen, verdict=verdict: Verdict(verdict))
        assert (turn(run) is not waits) is ended, verdict
    assert killed == [(END.stop_grace_s, END.kill_wait_s)] * 3
    monkeypatch.setattr(run.watch, "observe", lambda seen: Verdict("ok"))
    run.at, run.state.shutdown = Transition(State.STOPPING), Shutdown("preempted", gone_by_s=time.monotonic() + 9)
    assert turn(run).state is State.PREEMPTED, "its time is over"
    assert killed[3] == (END.preempt_grace_s, END.preempt_kill_s)
    run.at, view = waits, replace(view, ended=True)
    (run.attempt.heartbeats / "exit").write_text("0")
    run.attempt.beats = [beat(outcome="done", step=40)]
    view = replace(view, beats=tuple(run.attempt.beats))
    monkeypatch.setattr(recovery, "complete", lambda run: "")
    assert turn(run).state is State.COMPLETED
    run.at = Transition(State.RECOVERING)
    assert turn(run) == Transition(State.RUNNING), "an error came before the failure was recorded"
    run.attempt = None
    assert turn(run) == Transition(State.OPENING)


def test_a_stop_ends_although_the_runs_folder_cannot_be_read_any_more(make_loop, monkeypatch):
    """Each turn failed, the training was long gone, and the monitor never ended."""
    run = make_loop()
    run.at, run.state.shutdown, run.state.snapshots = Transition(State.STOPPING), Shutdown("stopped"), "/no/such/folder"
    monkeypatch.setattr("guards.checkpoint.states", Mock(side_effect=OSError(5, "Input/output error")))
    run.enter(turn(run))
    assert run.at.state is State.STOPPED and run.state.reason.startswith("stopped at step 0")


@pytest.mark.parametrize(
    ("view", "state", "code", "words"),
    [
        (StoreView(), State.QUEUED, None, "connecting to the store"),
        (StoreView(error="no answer"), State.QUEUED, None, "connecting to the store: no answer"),
        (StoreView(lease=LeaseState.UNUSABLE), State.FAILED, None, "the store s3://x cannot be used: connecting"),
        (StoreView(lease=LeaseState.LOST, message="taken"), State.FAILED, 4, "taken"),
        (StoreView(lease=LeaseState.REFUSED, message="other"), State.FAILED, 4, "other"),
        (StoreView(error="late"), State.FAILED, 4, "the store s3://x cannot be reached (late); waited 900 s; start"),
        (StoreView(), State.FAILED, 4, "the store's own process has not asked s3://x yet; see monitor.log, or"),
    ],
)
def test_the_first_attempt_waits_for_the_store(make_loop, view, state, code, words):
    run = make_loop()
    waited_s = 900 if state is State.FAILED else 899
    store = SimpleNamespace(poll=lambda: view, unreachable_s=lambda: waited_s, address="s3://x", admitted=False)
    result = supervisor.admission(run, store)
    assert (result.state, result.code) == (state, code) and result.message.startswith(words) and not store.admitted


def test_what_the_store_had_is_continued_and_a_lost_lease_ends_the_run(make_loop, trained, monkeypatch):
    run, restored = make_loop(), dict(ready=True, restored_step=20, restored_from="pod-1")
    views = [StoreView(ready=True), StoreView(**restored), StoreView(**restored)]
    store = SimpleNamespace(poll=lambda: views[0], admitted=False)
    adopted = lambda state, folder: "already completed" if len(views) == 1 else ""  # noqa: E731
    monkeypatch.setattr(RunState, "adopt_restored", adopted)
    assert supervisor.admission(run, store) is None and not events(run.folder.folder)
    assert views.pop(0) and supervisor.admission(run, store) is None and store.admitted
    assert events(run.folder.folder, "restored")[0]["message"] == "fetched step 20 from the store, written by pod-1"
    assert views.pop(0) and supervisor.admission(run, store) == Transition(State.COMPLETED, "already completed")
    assert supervisor.lease_lost(run) is None
    run.store, run.attempt = SimpleNamespace(**vars(store), close=lambda limit_s: None, summary=dict, holds=False), None
    assert supervisor.lease_lost(run) is None
    views[0] = StoreView(lease=LeaseState.LOST, message="pod-2 trains it")
    assert supervisor.lease_lost(run) == Transition(State.FAILED, "pod-2 trains it", code=4)
    run.at = Transition(State.RUNNING, due_s=time.monotonic() + 99, give_up_s=time.monotonic() + 999)
    assert supervisor.lease_lost(run) is None, "what cannot be killed is tried again later"
    killed = []
    monkeypatch.setattr(supervisor, "kill_processes", lambda run, attempt: killed.append(attempt))
    run.at, run.attempt = Transition(State.RUNNING), trained(run)
    assert supervisor.lease_lost(run).state is State.FAILED and killed == [run.attempt]


@pytest.mark.parametrize(
    ("status", "leads", "complete", "expected"),
    [
        (ExitStatus(0, None, "done", "n", True), True, "", (State.COMPLETED, None, "5 steps, 0 restarts; n")),
        (ExitStatus(0, None, "done", "n", True), True, "damaged", (State.BACKOFF, None, "")),
        (ExitStatus(3, None, "stopped", "", False), True, "", (State.STOPPED, None, "stopped at step 5 as requested")),
        (ExitStatus(3, None, "stopped", "", False), 0, "", (State.PREEMPTED, None, "another machine ended")),
        (ExitStatus(3, None, "stopped", "", False), 1, "", (State.STOPPED, 0, "another machine ended")),
        (ExitStatus(1, None, "failed", "oom", False), True, "", (State.BACKOFF, None, "")),
    ],
)
def test_the_end_of_a_script_is_an_end_of_the_run(make_loop, trained, monkeypatch, status, leads, complete, expected):
    run = make_loop("nodes = 2\n" if leads is not True else "", machine=None if leads is True else leads)
    attempt = run.attempt = trained(run, outcome=status.outcome)
    run.state.best_step = 5 + status.trained  # a mitigation has shortened the run since
    monkeypatch.setattr(attempt, "exit_status", lambda beats: status)
    monkeypatch.setattr(recovery, "complete", lambda run: complete)
    run.at = Transition(State.RUNNING)
    result = turn(run)
    if result.state is State.RECOVERING:
        run.at = result
        result = turn(run)
    assert (result.state, result.code) == expected[:2] and result.message.startswith(expected[2])
    assert len(events(run.folder.folder, "crash")) == (expected[0] is State.BACKOFF)
    if expected[0] is State.BACKOFF:
        assert run.attempt is None and run.incident.evidence.outcome == ("lora_damaged" if complete else "failed")


def test_a_suspicion_is_looked_into_once_and_progress_ends_it(make_loop, trained, monkeypatch):
    run, probes = make_loop(), [Mock(), Mock()]
    began, asked = iter(probes), []
    attempt, view = trained(run), Observation(time.monotonic(), 0.0, (beat(),))
    monkeypatch.setattr(supervisor, "Probe", lambda *given: asked.append(given[-2:]) or next(began))
    verdict = Verdict("suspect", step=5, phase="step", stalled_s=4.0, budget_s=6.0)
    for _ in range(2):
        run.at = supervisor.suspect(run, attempt, view, verdict)
        assert run.at == Transition(State.SUSPECT, "no progress for 4 s", view.now_s + 2)
    assert asked == [(view.beats, True)]
    (event,) = events(run.folder.folder, "suspect")
    assert event["message"] == "training: no progress for 4.0 s (limit 6.0 s)" and event["step"] == 5
    slow = Verdict("slow", step=5, phase="step", evidence=("a busy disk", "swap"))
    for _ in range(2):
        run.at = supervisor.slow(run, slow)
        assert run.at == Transition(State.SLOW, "a busy disk; swap")
    assert len(events(run.folder.folder, "slow")) == 1
    calm = supervisor.progressing(run, attempt, view, Verdict("ok", step=6, phase="step", stalled_s=1.0, budget_s=10.0))
    assert calm == Transition(State.RUNNING, due_s=view.now_s + 4.0), "the next turn is when a suspicion begins"
    assert run.probe is None and probes[0].close.called and run.calm_since_s == view.now_s and run.slow_reason == ""
    assert "progress again: training, step 6" in (run.folder.folder / "monitor.log").read_text()
    supervisor.suspect(run, attempt, view, verdict)
    assert asked[1] == (view.beats, False), "the last suspicion was wrong a moment ago"
    run.at = Transition(State.STARTING)
    begins = Observation(view.now_s, 0.0, (beat(count=0),))
    assert supervisor.progressing(run, attempt, begins, Verdict("ok")) is run.at
    run.queue.devices, run.queue.held, run.standby.tick = ["0"], False, Mock()
    using = replace(view, beats=(beat(about={"device": "cuda:0"}),))
    assert supervisor.progressing(run, attempt, using, Verdict("ok")).state is State.RUNNING and run.state.gpu
    assert not run.standby.tick.called, "adopted: its standby would train without the GPU's lock"


@pytest.mark.parametrize(
    ("saved", "machine", "kept", "state", "words"),
    [
        ({}, None, {"x": 1}, State.QUEUED, "preparing the start"),
        ({"state": State.FAILED, "reason": "no"}, None, None, State.QUEUED, "preparing the start"),
        ({"state": State.PREEMPTED}, None, None, State.QUEUED, "preparing the start"),
        ({"state": State.PREEMPTED}, 0, {"x": 1}, State.QUEUED, "preparing the start"),
        ({"state": State.BACKOFF}, None, {"x": 1}, State.QUEUED, "preparing the start"),
        ({"state": State.STOPPING, "shutdown": Shutdown("paused")}, None, {"x": 1}, State.PAUSED, "paused at step 0"),
        ({"state": State.STOPPING, "shutdown": Shutdown("stopped"), "anew": True}, None, {"x": 1},
         State.QUEUED, "preparing the start"),  # killed while it stopped, and started by a person: not only at the second press
        ({"state": State.STOPPING, "current": True, "shutdown": Shutdown("paused"), "anew": True}, None, {"x": 1},
         State.STOPPING, "saving a checkpoint, then restarting"),
        ({"state": State.RUNNING, "current": True}, None, {"x": 1}, State.RUNNING, "adopted after the monitor had been"),
        ({"state": State.RUNNING, "current": True, "failing": True, "incident": "0001"}, None, {"x": 1},
         State.RUNNING, "adopted after"),  # its incident cannot be read
        ({"state": State.STOPPING, "current": True, "shutdown": Shutdown("stopped", gone_by_s=1.0)}, None, {"x": 1},
         State.STOPPING, "saving a checkpoint"),
        ({"state": State.STOPPING, "shutdown": Shutdown("preempted", gone_by_s=1.0)}, None, {"x": 1},
         State.QUEUED, "preparing the start"),  # killed with its machine while it stopped
        ({"state": State.STOPPING, "current": True, "shutdown": Shutdown("preempted")}, None, {"x": 1},
         State.STOPPING, "saving a checkpoint, then restarting"),
        ({"state": State.STOPPING, "current": True, "shutdown": Shutdown("preempted")}, 0, {"x": 1},
         State.QUEUED, "preparing the start"),
        ({"state": State.FAILED, "current": True}, None, None, State.QUEUED, "preparing the start"),
        ({"state": State.RUNNING, "current": True}, 1, {"x": 1}, State.QUEUED, "preparing the start"),
        ({"state": State.QUEUED, "current": "not begun"}, None, {"x": 1}, State.QUEUED, "preparing the start"),
    ],
)  # fmt: skip
def test_a_new_monitor_continues_what_was_under_way(make_loop, trained, saved, machine, kept, state, words):
    run = make_loop("nodes = 2\n" if machine is not None else "", machine=machine)
    run.state.history = replace(run.state.history, failures={"x": 1})
    for name, value in saved.items():
        if name == "current":
            made = trained(run)
            if value is True:
                (made.heartbeats / "exit").write_text("1")
            value = made.record
        setattr(run if name == "anew" else run.state, name, value)
    result = turn(run)
    assert result.state is state and result.message.startswith(words)
    assert (run.state.history.failures or None) == kept
    attached = saved.get("current") is True and kept is not None and machine is None
    assert (run.attempt is not None) is attached
    if state is State.QUEUED:
        assert run.state.started_at and run.state.spec_hash and run.state.reason is run.state.shutdown is None
    if state is State.STOPPING:
        ending = "changed" if run.anew else saved["shutdown"].ending.replace("preempted", "changed")
        assert run.state.shutdown == Shutdown(ending), "the time of another boot means nothing"


@pytest.mark.parametrize("kept", [0, 20])
def test_steps_that_are_trained_again_after_a_users_start_are_new(make_loop, kept):
    """A run that was started again from its beginning gave up after five failures, each of which it had survived."""
    run = make_loop()
    run.state.state, run.state.best_step = State.STOPPED, 60
    if kept:
        saved_state(run.folder.folder, kept)
    assert turn(run).state is State.QUEUED and run.state.best_step == kept
    run.observe(Mock(poll=lambda *_: Observation(0.0, 0.0, (beat(step=kept + 1),))))
    assert run.state.best_step == kept + 1


def test_a_start_waits_for_its_time_its_gpu_and_its_store(make_loop, trained, monkeypatch):
    run = make_loop()
    run.at = Transition(State.BACKOFF, due_s=time.monotonic() + 99)
    assert turn(run) is run.at
    run.at, run.queue.devices, run.queue._listed = Transition(State.BACKOFF), ["0"], lambda: None
    run.queue.held = False
    waiting = turn(run)
    assert waiting.state is State.QUEUED and "the driver has not listed its GPUs yet" in waiting.message
    run.queue.held, started = True, [Transition(State.BACKOFF, "no memory"), trained(run)]
    monkeypatch.setattr(recovery, "start_attempt", lambda run: started.pop(0))
    run.store = Mock(admitted=False, poll=StoreView, unreachable_s=lambda: 0.0, holds=False, summary=dict)
    assert turn(run).message == "connecting to the store" and len(started) == 2
    run.store.admitted = True
    assert turn(run).message == "no memory" and run.attempt is None
    run.state.resumed_step = 20
    assert turn(run) == Transition(State.STARTING, "Starting from step 20") and run.attempt is not None


def test_a_run_of_another_account_is_refused_with_what_to_do_and_not_tried_ten_times(folder, monkeypatch):
    folder.mkdir(parents=True)
    refused = PermissionError(errno.EACCES, "Permission denied", str(folder / LOCK))
    monkeypatch.setattr(supervisor, "Lock", lambda path: Mock(acquire=Mock(side_effect=refused)))
    with pytest.raises(MonitorError, match=rf"{LOCK}: this account may not write there; start the run as the account"):
        supervisor.supervise(folder, folder.parent, False, None, False, [])


def test_a_monitor_begins_once_and_lets_go_at_the_end(make_loop, monkeypatch, capfd):
    run = make_loop()
    folder, keeper, woken = run.folder.folder, platform.process_info(os.getppid()), []
    request = folder / "stop.request"
    loops: list[Loop] = []
    monkeypatch.setattr(supervisor, "wake_queue", lambda outputs: woken.append((outputs, is_held(folder / LOCK))))
    monkeypatch.setattr(Loop, "run_until_final", lambda loop: loops.append(loop) or 7 + is_held(folder / LOCK))

    def supervised(restarted: bool, **saved) -> int:
        RunState(**saved).save(run.folder)
        request.write_text("{}")
        os.utime(request, (time.time() - 60,) * 2)
        return supervisor.supervise(folder, folder.parent, False, keeper.pid, restarted, [signal.SIGINT])

    assert supervised(False) == 8 and not request.exists(), "that was meant for a monitor of before"
    (loop,) = loops
    ours = f"{keeper.pid} {keeper.start}"
    assert loop.state.keeper == ours and loop.signals == [signal.SIGINT] and not loop.anew
    monkeypatch.setenv(CHECKED, START + UNCHECKED)
    assert supervised(True) == 8 and request.exists()
    for known, code in ((ours, 4), ("7 1.0", 8)):  # the monitor before this one had saved the end
        assert supervised(True, state=State.FAILED, code=4, keeper=known) == code
    assert supervised(True, state=State.UNKILLABLE, keeper=ours) == 8
    assert supervised(False, state=State.FAILED, keeper=ours) == 8
    assert [one.anew for one in loops] == [False] * 4 + [True], "a person has started it"
    (folder / "toy.safetensors").touch()
    assert supervised(True, state=State.COMPLETED, spec_hash=spec_hash(folder)) == 0
    assert "toy: already completed" in capfd.readouterr().out
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stdout", Mock(fileno=lambda: 1, write=Mock(side_effect=BrokenPipeError)))
        assert supervised(True, state=State.COMPLETED, spec_hash=spec_hash(folder)) == 0, "not a failure of the monitor"
    monkeypatch.setenv("HANGPROOF_LIMITS", "/no/such/file")
    with pytest.raises(MonitorError, match="/no/such/file"):
        supervised(True)
    assert woken == [(folder.parent, False)] * 9
    deleted = folder.with_name("deleted")
    with pytest.raises(MonitorError, match="the run was deleted"):
        supervisor.supervise(deleted, folder.parent, False, keeper.pid, False, [])
    assert not deleted.exists(), "its folder is not made again"


def test_the_evidence_of_a_probe_decides_and_a_trial_is_not_hung_without(make_loop):
    run, view = make_loop(), Observation(100.0, 100.0, (beat(beat_s=100.0, step_s=100.0, phase_s=100.0),))
    assert supervisor.judge(run, view).kind == "ok"
    polled, found, limit_s = [], [Signals()], run.watch._budget("step")
    late = replace(view, now_s=100 + 1.5 * limit_s, boot_s=100 + 1.5 * limit_s)
    run.watch._clock_s += 1.5 * limit_s  # nobody missed a turn
    run.probe = SimpleNamespace(
        spy=SimpleNamespace(poll=lambda: polled.append(1)), signals=Signals(), close=lambda: None,
        due=lambda verdict, now_s: verdict.kind == "suspect", sample_again=lambda beats, budget_s: found[0],
    )  # fmt: skip
    for found[0], kind in ((Signals(), "suspect"), (Signals(stuck=("x",)), "hung"), (Signals(slow=("x",)), "slow")):
        assert supervisor.judge(run, late).kind == kind
    assert len(polled) == 3
    run.probe.due = lambda verdict, now_s: False
    run.watch._clock_s += 1e6
    later = replace(late, now_s=late.now_s + 1e6, boot_s=late.boot_s + 1e6)
    assert supervisor.judge(run, later).kind == "hung"
    run.trial = True
    assert supervisor.judge(run, later).kind == "suspect"
