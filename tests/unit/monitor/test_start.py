"""What keeps a run from its start, and what a start takes over, without a training."""

import sys
import time
from types import SimpleNamespace

import pytest
from monitor_evidence import beat, saved_state
from monitor_helpers import events

from monitor import config, start
from monitor.process import platform, spawned
from monitor.resume import checkpoints
from monitor.run_folder import MonitorError
from monitor.state import ResumePoint, RunState, Shutdown, State, Transition, spec_hash

LIMITS = config.load(environ={}).restart


def test_a_start_that_the_system_refuses_is_tried_up_to_the_limit_with_growing_waits(make_loop, monkeypatch):
    clock, run = [100.0], make_loop()
    monkeypatch.setattr(start, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    waits, limit_s = [], LIMITS.start_s
    while (wait := start._try_again(run, "no descriptor", limit_s, 4)).state is State.BACKOFF:
        waits.append(wait.due_s - clock[0])
        clock[0] = wait.due_s
    assert waits[:8] == [1, 2, 4, 8, 16, 32, 60, 60] and limit_s <= clock[0] - 100 < limit_s + 60
    assert wait == Transition(State.FAILED, wait.message, code=4)
    assert wait.message.startswith(f"no descriptor (tried {len(waits) + 1} times in 1")
    assert start._try_again(run, "a full disk", limit_s + 1).due_s == clock[0] + 1, "another reason starts over"
    assert [event["message"] for event in events(run.folder.folder, "backoff")] == ["no descriptor", "a full disk"]


@pytest.mark.parametrize(
    ("wish", "trained_on", "found", "gpus", "state", "words"),
    [
        ("", "", 0, 1, None, ""),
        ("0", "a GPU", 0, 1, None, ""),
        ("1", "", None, 1, None, ""),  # the driver does not answer
        ("1", "", 1, 1, None, ""),
        ("", "A40", 0, 1, State.PREEMPTED, "the run has trained on A40, and this machine has none: nothing is trained"),
        ("1", "", 0, 1, State.FAILED, "the run needs 1 GPU, and this machine has none: nothing is trained on the CPU"),
        ("1", "", 1, 2, State.FAILED, "the run needs 2 GPUs, and this machine has 1 GPU: it needs 2 (or set"),
    ],
)
def test_a_run_that_needs_a_gpu_has_one(make_loop, monkeypatch, wish, trained_on, found, gpus, state, words):
    run = make_loop(f"gpus = {gpus}\n")
    monkeypatch.setenv(start.NEEDS_GPU, wish)
    monkeypatch.setattr(run.gpus, "count", lambda pause: found)
    run.state.gpu = trained_on
    result = start.gpu_missing(run)
    assert (result.state if result else None) is state
    if result is not None:
        assert words in result.message and result.code == (4 if state is State.FAILED else None)


def test_the_gpu_that_a_training_uses_is_recorded_once(make_loop):
    run = make_loop()
    start.note_gpu(run, [beat(about={"device": "cpu"}), beat(about={})])
    assert run.state.gpu == ""
    start.note_gpu(run, [beat(), beat(about={"device": "cuda:0"})])
    assert run.state.gpu and RunState.load(run.folder).gpu == run.state.gpu
    run.state.gpu = "RTX 4090"
    start.note_gpu(run, [beat(about={"device": "cuda:0"})])
    assert run.state.gpu == "RTX 4090"


def test_the_state_of_another_machine_is_continued_without_what_depends_on_that_machine(make_loop):
    there = make_loop()
    folder, change = there.folder.folder, {"name": "workers_0", "sentence": "no workers"}
    before = RunState(
        State.FAILED, attempt=3, restarts=2, best_step=40, changes=[change], changes_at_save=["batch_1"], failing=True,
        spec_hash=spec_hash(folder), durations={"step": {"n": 3}}, cause_counts={"oom": 1},
    )  # fmt: skip
    before.ledger.steps = 40

    def adopted(**changed):
        for name, value in changed.items():
            setattr(before, name, value)
        (folder / "monitor.json").unlink(missing_ok=True)
        here = make_loop()
        before.save(here.folder)
        return start.adopt_restored(here), here.state

    reason, state = adopted()
    assert reason == "" and (state.attempt, state.restarts, state.best_step, state.best_before) == (3, 2, 40, 40)
    assert state.changes == [change] and state.cause_counts == {"oom": 1} and state.ledger.steps == 40
    assert not state.durations and not state.failing
    (folder / "toy.safetensors").write_bytes(b"x")
    assert adopted()[0] == ""
    assert adopted(state=State.COMPLETED)[0] == "already completed on another machine (40 steps); LoRA: toy.safetensors"
    assert RunState.load(there.folder).best_before == 40, "saved"
    assert adopted(spec_hash="another")[0] == ""
    for wrong in ({"best_step": "x"}, {"best_step": 40, "changes_at_save": ["$(rm)"]}):
        reason, state = adopted(**wrong)
        assert reason == "" and state.best_step == 0
    assert "cannot be used and is ignored" in (folder / "monitor.log").read_text()


def test_where_states_are_and_how_long_the_machine_stays(make_loop, tmp_path):
    run, second = make_loop(), make_loop("nodes = 2\n", machine=1)
    own = run.folder.folder
    assert run.leads and not run.several and second.several and not second.leads and make_loop("", machine=0).leads
    assert run.state_folders() == [own]
    for one in (run, second):
        one.state.save_dir = str(tmp_path / "local")
    assert run.state_folders() == [own], "it is not there"
    (tmp_path / "local").mkdir()
    assert run.state_folders() == [own, tmp_path / "local"] and second.state_folders() == [own]
    assert run.remaining_s() == float("inf")
    run.state.shutdown = Shutdown("preempted", gone_by_s=time.monotonic() + 50)
    assert 40 < run.remaining_s() <= 50
    run.state.shutdown = Shutdown("preempted", gone_by_s=time.monotonic() - 50)
    assert run.remaining_s() == 0


def test_what_prevents_a_start_is_said_and_a_full_disk_may_pass(make_loop, monkeypatch):
    run = make_loop('name = "toy"\n')
    wrong = lambda *_: (_ for _ in ()).throw(MonitorError("run.toml: no tier"))  # noqa: E731
    for problems, said in ((lambda *_: ["no model", "no tier"], "no model; no tier"), (wrong, "run.toml: no tier")):
        monkeypatch.setattr(start.next_attempt, "start_problems", problems)
        assert start.start_attempt(run) == Transition(State.FAILED, said)
    monkeypatch.setenv(start.next_attempt.CHECKED, "1")  # whoever started the monitor has looked
    monkeypatch.setattr(run.prewarm, "render", wrong)
    assert start.start_attempt(run).message == "attempt 1 cannot be started: run.toml: no tier"
    monkeypatch.setattr(checkpoints, "room_missing", lambda folders: "the disk is full")
    assert start.start_attempt(run) == Transition(State.FAILED, "the disk is full, then start the run again")
    run.state.attempt = 1
    assert start.start_attempt(run).state is State.BACKOFF and run.wait_limit_s == LIMITS.disk_wait_s
    monkeypatch.setenv(start.NEEDS_GPU, "1")
    monkeypatch.setattr(run.gpus, "count", lambda pause: 0)
    assert "the run needs 1 GPU" in start.start_attempt(run).message


def test_the_newest_snapshot_is_written_to_the_disk_before_its_memory_is_freed(make_loop, monkeypatch, tmp_path):
    run, asked = make_loop(), []
    pause = lambda seconds: None  # noqa: E731
    assert start.keep_newest(run, pause) == "" and run.unkept is None
    run.state.snapshots = str(tmp_path)
    saved_state(run.folder.folder, 10)
    monkeypatch.setattr(start, "_snapshots", lambda run, after_step, room: asked.append((after_step, room)) or [])
    point = ResumePoint(None)
    monkeypatch.setattr(checkpoints, "choose", lambda *_: point)
    assert start.keep_newest(run, pause) == "" and asked == [(10, False)]
    for code, said in ((0, ""), (1, "the newest steps, to step 25, could not be written to the disk")):
        run.unkept, point = None, ResumePoint(None, 25, record=tmp_path / "record", python=str(tmp_path / "python"))
        (tmp_path / "python").write_text(f"#!/bin/sh\n[ {code} = 1 ] || echo '{{}}'\nexit {code}\n")
        (tmp_path / "python").chmod(0o755)
        assert start.keep_newest(run, pause).startswith(said) and start.keep_newest(run, pause) == run.unkept
        assert bool(run.unkept) is bool(code)
    assert "the snapshot of step 25 was written to the disk" in (run.folder.folder / "monitor.log").read_text()


def test_a_tracker_that_cannot_be_started_costs_the_run_nothing(make_loop, monkeypatch):
    run, commands = make_loop('trackers = "trackio"\n'), []
    attempt = SimpleNamespace(record=SimpleNamespace(number=1), pid=7)
    monkeypatch.setattr(start, "helper", lambda command, log: commands.append((command, log.name)))
    start._report_start(run, attempt, "from the start")
    folder = run.folder.folder
    assert commands == [([sys.executable, "-m", "monitor.trackio_feed", str(folder)], str(folder / "trackio.log"))]
    monkeypatch.setattr(start, "helper", lambda *_: (_ for _ in ()).throw(OSError(12, "Cannot allocate memory")))
    start.start_tracker(run.folder)
    assert "trackio could not be started: Cannot allocate memory" in (folder / "monitor.log").read_text()
    start._report_start(make_loop(), attempt, "from the start")
    assert len(commands) == 1


def test_processes_that_cannot_be_killed_let_nothing_start(make_loop, monkeypatch):
    run = make_loop("")
    one = platform.ProcessInfo(7, 1.0, 1, "D", "python", 0.0, 0)
    spared, given = platform.ProcessInfo(8, 1.0, 1, "S", "bash", 0.0, 0), []
    monkeypatch.setattr(spawned, "with_environment", lambda name, value: [one, spared])
    monkeypatch.setattr(run.standby, "pids", lambda: {8})
    end = config.load().end

    def kill(tree, *limits):
        given.append((dict(tree.members), limits))
        return spawned.KillResult((one,), (one,), 1.0)

    monkeypatch.setattr(spawned, "kill", kill)
    with pytest.raises(start.Unkillable, match=r"python \(7\)"):
        start.start_attempt(run)
    assert given == [({7: one}, (end.grace_s, end.kill_wait_s))]
