"""What status.json says of a run, and what is written with it."""

import json
import math
import os
import time

import pytest
from monitor_evidence import beat, saved_state
from monitor_helpers import events

from monitor import status_writer
from monitor.process import platform
from monitor.run_folder import RunFolder
from monitor.state import Observation, RunState, State, Transition, read_status

GPU = {"name": "Stand-in", "utilization": 50, "memory_used": 1, "uuid": "GPU-0", "pids": [7], "spill": False, "use": {}}


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the status writer's clock is ahead."""
    ahead, now = [0.0], platform.now
    monkeypatch.setattr(
        platform, "now", lambda: (m := now()).__class__(m.mono_s + ahead[0], m.boot_s, m.wall_s + ahead[0])
    )
    return ahead


@pytest.fixture
def running(make_loop, trained, monkeypatch):
    """A run in training at step 20 of 40, on one of two GPUs."""
    loop = make_loop()
    monkeypatch.setattr(loop.gpus, "read", lambda: ({**GPU, "name": "other"}, GPU))
    loop.queue.devices = ["1"]
    loop.attempt = trained(loop)
    loop.attempt.tree.members = {os.getpid(): platform.process_info(os.getpid())}
    loop.at, loop.state.planned, loop.state.resumed_step = Transition(State.RUNNING, "so far"), 40, 8
    now_s = time.monotonic()
    for step in range(12, 21):
        seen_s = now_s - 0.5 * (20 - step)
        rank = dict(beat_s=seen_s, step_s=seen_s, count=step - 8, epoch=2, done=3, total=9, note="n", pid=2**22 + 1)
        rank["intervals"] = (0.5,) * (step - 8)
        loop.view = Observation(seen_s, seen_s, (beat(0, step, **rank), beat(1, step - 1, **{**rank, "rank": 1})))
        loop.watch.observe(loop.view)
    return loop


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
    assert not {"uuid", "pids", "spill", "use"} & second.keys()

    for waited_s, figures in ((status_writer.MACHINE_S - 1, "as before"), (1.5, "new")):
        clock[0] += waited_s
        sum(range(2_000_000))  # uses processor time
        running.write_status()
        assert (read_status(folder)["cpu_cores"] is None) is (figures == "as before")
    assert 0 < read_status(folder)["cpu_cores"] < 64
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2, "GPU samples are rarer"

    running.at = Transition(State.COMPLETED)
    running.view = Observation(0.0, 0.0, (beat(0, 40, loss=math.nan),))
    clock[0] += status_writer.GPU_S
    running.write_status(force=True)
    ended = read_status(folder)
    gone = ("phase", "eta_s", "pid", "loss", "cpu_cores", "memory_bytes", "lora", "slow", "store", "checkpoint")
    assert [ended[key] for key in gone] == [None] * len(gone) and ended["trainer_pids"] == []
    assert (ended["step"], ended["phase_done"], ended["phase_total"], ended["note"]) == (40, 0, 0, "")
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_run_that_has_not_begun_shows_where_it_resumes(make_loop):
    loop = make_loop('store = "s3://x"\nnodes = 2\n', machine=0)
    loop.state.resumed_step = 8
    assert loop.write_status(force=True)
    shown = read_status(loop.folder.folder)
    assert (shown["state"], shown["step"], shown["epoch"], shown["loss"]) == ("queued", 8, 0, None)
    assert shown["host"] and shown["machines"] == [] and shown["store"]["address"] == "s3://x"
    assert shown["last_progress_at"] is None and shown["step_s"] is None and shown["cpu_cores"] is None
    loop.state.best_step = 12
    loop.write_status(force=True)
    assert read_status(loop.folder.folder)["step"] == 12


def test_a_new_checkpoint_is_shown_and_told_once_and_one_without_its_guard_file_is_not(running, clock):
    loop, folder = running, running.folder.folder
    (folder / "toy-step00000030-state").mkdir()
    assert loop.write_status(force=True)
    first = read_status(folder)
    assert first["checkpoint"] is None
    state = saved_state(folder, 20)
    clock[0] += 0.9
    assert loop.write_status()
    assert read_status(folder)["updated_mono_s"] == first["updated_mono_s"], "not that soon again"
    clock[0] += 0.2
    loop.write_status()
    assert read_status(folder)["updated_mono_s"] > first["updated_mono_s"]
    assert read_status(folder)["checkpoint"] is None and not (folder / "monitor.json").exists()
    clock[0] += status_writer.CHECKPOINTS_S
    for _ in range(2):
        loop.write_status()
        clock[0] += 2 * status_writer.CHECKPOINTS_S
    assert read_status(folder)["checkpoint"] == {"path": str(state), "step": 20}
    assert [(told["step"], told["path"]) for told in events(folder, "checkpoint")] == [(20, str(state))]
    assert RunState.load(loop.folder).planned == 40, "saved with its ledger"
    (folder / "status.json").unlink()
    (folder / "status.json").mkdir()
    assert not loop.write_status(force=True)
    (folder / "status.json").rmdir()
    (folder / "monitor.json").unlink()
    (folder / "monitor.json").mkdir()
    loop.state.restarts = 3
    assert not loop.state.save(loop.folder)
    (folder / "monitor.json").rmdir()
    loop.state.restarts = 4  # under way: not committed
    loop.write_status(force=True)
    assert RunState.load(loop.folder).restarts == 3, "what the disk refused is saved with the next status"


def test_each_phase_of_an_attempt_is_told_once(make_loop):
    loop = make_loop()
    status = loop.status
    status.note_phase([])
    assert not status.steps
    for phase, total in (("load", 0), ("load", 0), ("cache_latents", 9), ("step", 0), ("load", 0)):
        status.note_phase([beat(phase=phase, total=total)])
        assert status.steps is ("step" in status._phases)
    status.new_attempt()
    status.note_phase([beat(phase="load", step=3)])
    assert not status.steps
    told = [(event["message"], event["step"]) for event in events(loop.folder.folder, "phase")]
    assert told == [("load", 5), ("cache_latents, 9 items", 5), ("step", 5), ("load", 3)]


def test_a_message_that_cannot_be_sent_is_logged_with_what_the_sender_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_NOTIFY", str(tmp_path / "notify.toml"))
    monkeypatch.setattr(status_writer, "python", lambda module: ["sh", "-c", "cat; exit ${CODE:-2}"])
    folder = RunFolder(tmp_path)
    notifier = status_writer.Notifier("toy", folder.log)
    notifier.event("hang", "nothing is configured")
    notifier.poll(30)
    (tmp_path / "notify.toml").touch()
    notifier.event("crash", "x" * 600)
    monkeypatch.setenv("CODE", "0")
    notifier.event("failed", "sent")
    notifier.poll(30)
    (line,) = (tmp_path / "monitor.log").read_text().splitlines()
    said = line.partition("notification of crash: ")[2]
    assert said.startswith('{"kind": "crash", "title": "toy: crash", "body": "xxx') and len(said) == 500
    notifier.poll(30)
    notifier.event("hang", "this one takes longer")
    notifier.poll()
    notifier.poll(30)
