"""The standby attempt: the next attempt is started early, and is dropped where it would train something else.

tests/campaigns/faults.toml has its deaths and hangs.
"""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from monitor_helpers import events, wait_for
from run_facts import status
from standby_helpers import Run

from monitor import config
from monitor.attempt import Attempt
from monitor.process import platform
from monitor.resume.next_attempt import LOOK_S, STAND_IN, Standby, message, never
from monitor.run_folder import RunFolder

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="the standby attempt needs Linux")


@pytest.mark.slow
def test_a_crash_is_continued_by_the_standby_and_another_one_is_started(tmp_path):
    run = Run(tmp_path)
    process = run.start()
    first = run.until_ready()
    waiting = psutil.Process(first).children(recursive=True)[-1].pid
    training = status(run.folder)["trainer_pids"]
    assert waiting not in training
    os.kill(training[0], signal.SIGKILL)
    second = wait_for(lambda: (pid := run.until_ready()) != first and pid, what="the next standby")
    assert status(run.folder)["trainer_pids"] == [waiting] and second != first
    run.finish(process)
    run.check_complete(restarts=1)
    assert "which had been started early" in events(run.folder, "restarted")[0]["message"]
    assert not [e for e in events(run.folder, "killed") if "what an earlier attempt left" in e["message"]]
    log = (run.folder / "training.log").read_text()
    assert log.count("attempt 2: train.attempt-2.sh") == 1 and STAND_IN not in log
    assert STAND_IN not in (run.folder / "train.attempt-2.sh").read_text()


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """The standby of a run, which is not started, with its prepared script; the attempt that trains."""
    monkeypatch.setenv("HANGPROOF_LIMITS", "")
    for name in ("TMPDIR", "HANGPROOF_SHM"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = Run(tmp_path / "data")
    for name, value in run.env.items():
        monkeypatch.setenv(name, value)
    folder = RunFolder(run.folder)
    found = {"text": (run.folder / "train.sh").read_text().rstrip() + f" --resume {run.folder / STAND_IN}\n"}
    more = {"queue": SimpleNamespace(handles=tuple), "record": lambda attempt: None}
    prewarm = SimpleNamespace(found=found, prepared=lambda: prewarm.found)
    standby = Standby(SimpleNamespace(folder=folder, config=config.load(), prewarm=prewarm, **more))
    trains = Attempt.prepare(folder, 1)
    yield standby, trains
    standby.close()
    trains.close()


def test_it_is_dropped_where_it_would_train_something_else_and_when_memory_becomes_short(alone, monkeypatch):
    standby, trains = alone
    text = standby.run.prewarm.found["text"]
    standby._begin(2, text)
    assert standby.summary()["state"] == "starting"
    view = SimpleNamespace(now_s=time.monotonic(), beats=[])
    wait_for(lambda: standby.tick(view, trains) or standby.ready, 60, "a standby")
    assert standby.summary()["state"] == "ready"

    folder, pids, dropped = standby.folder.folder, standby.pids(), []
    state, script = folder / "toy-step00000010-state", folder / "train.attempt-2.sh"
    script.write_text(text.replace(str(folder / STAND_IN), str(state)))
    with monkeypatch.context() as patch:
        patch.setattr(standby, "drop", dropped.append)
        later = script.with_name("train.attempt-3.sh")
        assert standby.release(later, state, {}) is standby.release(script, None, {}) is None
        script.write_text(script.read_text().replace("--max_train_steps", "--lowered 1 --max_train_steps"))
        assert standby.release(script, state, {}) is None
        patch.setattr("guards.reading.commit", lambda checkout: "another")
        assert standby.release(script, state, {}) is None
    changed = "the failure changes the script"
    assert dropped == [changed, "the training starts over", changed, "Hangproof was updated"]

    monkeypatch.setattr("guards.reading.available_bytes", lambda: 1 << 20)
    standby._next_s = 0.0
    standby.tick(view, trains)
    assert standby.summary()["state"] == "none" and "memory is short" in standby.summary()["reason"]
    assert pids and not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def test_while_it_waits_the_machine_is_not_searched_for_its_processes_but_its_end_is_noticed(alone, monkeypatch):
    standby, trains = alone
    text = standby.run.prewarm.found["text"]
    standby._begin(2, text)
    view = SimpleNamespace(now_s=time.monotonic(), beats=[])

    def look():
        standby._next_s = 0.0
        standby.tick(view, trains)
        return standby.ready

    wait_for(look, 60, "a standby")
    look()
    with monkeypatch.context() as patch:
        patch.setattr(platform, "scan", Mock(side_effect=AssertionError))
        assert look()
    for pid in standby.pids():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not look() and "ended by itself" in standby.off, 60, "the end of the standby")


def test_a_standby_is_tried_again_after_a_while_and_at_once_after_a_restart(alone, monkeypatch):
    """Looks that can start nothing do not postpone the next start. After the third failure no more are started."""
    standby, trains = alone
    begun: list[float] = []
    monkeypatch.setattr(standby, "_begin", lambda *_: begun.append(standby._next_s - LOOK_S) or "it was killed")

    def look(now_s, steps=9, **found):
        standby.run.prewarm.found = found or {"text": "the script"}
        standby.tick(SimpleNamespace(now_s=now_s, beats=[SimpleNamespace(count=steps)]), trains)
        return len(begun)

    standby.run.prewarm.found = {}
    standby.tick(SimpleNamespace(now_s=100.0, beats=[SimpleNamespace(count=9)]), trains)
    assert [look(100.1, steps=0), look(100.2), look(100.3)] == [0, 1, 1]
    assert standby.release(Path("train.sh"), None, {}) is None
    assert [look(100.4), look(100.4 + LOOK_S - 0.1), look(100.4 + LOOK_S), look(200.0), look(300.0)] == [2, 2, 3, 3, 3]
    assert begun == pytest.approx([100.2, 100.4, 100.4 + LOOK_S])
    assert standby.summary()["reason"] == "it was killed (3 times)"
    standby._tries, alone = 3, "the script was edited"  # it must not run twice at once
    assert look(400.0, text="the script", alone=alone) == look(500.0) == 3
    assert standby.summary() == {"state": "none", "pid": None, "memory_bytes": 0, "reason": alone}


def test_one_that_cannot_be_started_costs_the_run_nothing_and_says_why(alone, monkeypatch):
    standby, trains = alone
    monkeypatch.setattr(os, "pipe", Mock(side_effect=OSError(24, "Too many open files")))
    view = SimpleNamespace(now_s=100.0, beats=[SimpleNamespace(count=9)])
    standby.tick(view, trains)
    assert standby.summary()["reason"] == "it cannot be started: Too many open files"


def test_what_a_run_must_be_like_to_have_one(tmp_path):
    folder, limits = RunFolder(tmp_path), config.load().standby
    assert "not one of Hangproof's" in never(folder, limits)
    for folder.spec in ({"gpus": 2}, {"nodes": 2}):
        assert "several" in never(folder, limits)
    folder.spec = {"name": "x"}
    assert never(folder, limits) == ""


def test_the_message_is_written_at_once_or_not_at_all():
    variables = {f"HANGPROOF_SNAPSHOTS_{i}": "x" * 200 for i in range(4)}
    assert len(message("/" + "x" * 1000, variables, "/" + "y" * 1000)) <= 4096
