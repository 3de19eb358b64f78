"""The next attempt: when its script is rendered, and its standby, which is started early and dropped where it would train
something else. tests/campaigns/faults.toml has the standby's deaths and hangs.
"""

import io
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from machines import StandbyRun
from monitor_helpers import events, wait_for
from run_facts import status
from runs_helpers import folder_of

from guards import gate
from monitor import config
from monitor.attempt import Attempt
from monitor.process import platform
from monitor.resume import next_attempt
from monitor.resume.next_attempt import LOOK_S, REST_S, STAND_IN, Prewarm, Rendered, Standby, message, why_no_standby
from monitor.run_folder import MonitorError, RunFolder
from runs.quoting import quote

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="the standby attempt needs Linux")


@pytest.mark.slow
def test_a_crash_is_continued_by_the_standby_and_another_one_is_started(tmp_path):
    run = StandbyRun(tmp_path)
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
    run = StandbyRun(tmp_path / "data")
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

    folder, pids, dropped = standby.run.folder.folder, standby.pids(), []
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


def test_a_restart_waits_for_imports_under_way_and_not_for_imports_that_never_end(alone, monkeypatch):
    standby, _ = alone
    standby.run.pause, standby.run.record = time.sleep, Mock()
    text, folder = standby.run.prewarm.found["text"], standby.run.folder.folder
    state, script = folder / "toy-step00000010-state", folder / "train.attempt-2.sh"
    script.write_text(text.replace(str(folder / STAND_IN), str(state)))

    with monkeypatch.context() as patch:
        patch.setattr(standby.run.config.standby, "imports_s", 0.3)
        patch.setattr(Standby, "ready", False)
        standby._begin(2, text)
        stuck = standby.pids()
        assert standby.release(script, state, {}) is None
    assert standby.off == "it has not imported everything yet"
    assert stuck and not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in stuck)

    monkeypatch.setattr(standby.run.config.standby, "gate_s", 60.0)
    standby._begin(2, text)
    begun = standby.attempt
    attempt = standby.release(script, state, {})
    assert attempt is begun and (attempt.heartbeats / gate.PASSED).exists()
    standby.run.record.assert_called_once_with(attempt)
    attempt.kill(0.0, 5.0)
    attempt.close()


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
    assert "not one of Hangproof's" in why_no_standby(folder, limits)
    for folder.spec in ({"gpus": 2}, {"nodes": 2}):
        assert "several" in why_no_standby(folder, limits)
    folder.spec = {"name": "x"}
    assert why_no_standby(folder, limits) == ""


def test_the_message_is_written_at_once_or_not_at_all():
    variables = {f"HANGPROOF_SNAPSHOTS_{i}": "x" * 200 for i in range(4)}
    assert len(message("/" + "x" * 1000, variables, "/" + "y" * 1000)) <= 4096


ONE = {"name": "one", "sentence": "s", "patch": {}}


def job(answer=None, code=0, error="", done=True, timed_out=False) -> Mock:
    """A subprocess that has answered at once, or that fails."""
    made = Mock(code=code, error=error, timed_out=timed_out, done=Mock(return_value=done))
    made.answer.return_value = answer
    return made


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """The folder of a run; the requests so far; the jobs that answer the next ones."""
    (tmp_path / "run.toml").write_text('name = "toy"\nsave_dir = "/x"\n')
    (tmp_path / "job.json").write_text("{}")
    asked, replies = [], []
    monkeypatch.setattr(next_attempt, "_job", lambda folder, request, _: asked.append(request) or replies.pop(0))
    return run_of(RunFolder(tmp_path)), asked, replies


def run_of(folder: RunFolder, **state) -> SimpleNamespace:
    """The run in a folder, with these values of its state."""
    known = {"changes": [], "changes_at_save": [], **state}
    limits = SimpleNamespace(check=SimpleNamespace(render_s=9.0))
    return SimpleNamespace(folder=folder, state=SimpleNamespace(**known), config=limits, pause=None, several=False)


def test_the_next_script_is_rendered_once_until_the_job_or_the_changes_differ(jobs):
    run, asked, replies = jobs
    folder, prewarm = run.folder, Prewarm(run)
    text = f"go {folder.folder / STAND_IN}\n"
    waiting = job(done=False)
    made = {"text": text, "save_dir": "/s", "alone": "it copies"}
    replies += [waiting, job(), job(made)]
    prewarm.tick(100.0)
    prewarm.tick(109.0)
    assert [(request["want"], request["changes"]) for request in asked] == [("text", [])]
    assert prewarm.prepared() == {}
    prewarm.close()
    waiting.kill.assert_called_once()
    waiting.done.return_value = True  # it failed: the restart renders it, and reports what is wrong
    for now_s, requests in ((110.0, 1), (100.0 + REST_S - 1, 1), (100.0 + REST_S, 2), (180.0, 2), (400.0, 3)):
        prewarm.tick(now_s)
        assert len(asked) == requests, now_s
    prewarm.tick(500.0)
    assert len(asked) == 3 and prewarm.prepared() == made
    for number, place in ((2, "/my disk's \udce9"), (3, str(folder.folder))):  # `save_dir`: another word of the shell
        state = Path(place) / "toy-step00000010-state"
        ready = prewarm.render(number, state)
        assert ready == Rendered(folder.folder / f"train.attempt-{number}.sh", "/s")
        assert shlex.split(os.fsdecode(ready.script.read_bytes())) == ["go", str(state)]
        assert os.access(ready.script, os.X_OK)
    made = {"script": "/made", "save_dir": "", "compatible": False}
    for resume, changes, at_save in ((None, [], []), (state, [ONE], ["one"]), (state, [], ["one"])):
        replies.append(job(made))
        run.state.changes, run.state.changes_at_save = changes, at_save
        assert str(prewarm.render(3, resume).script) == "/made"
        request = {"want": "script", "number": 3, "resume": resume, "changes": changes, "was": at_save}
        assert asked[-1] == request
    run.state.changes_at_save = []
    assert prewarm.render(1, None) == Rendered(folder.folder / "train.sh", "/x")
    os.utime(folder.folder / "job.json", (0, 0))
    replies.append(job(made))
    assert str(prewarm.render(3, state).script) == "/made", "another job"


def test_what_the_subprocess_refuses_is_said_and_what_it_cannot_do_is_tried_again(jobs, tmp_path_factory):
    run, asked, replies = jobs
    folder = run.folder
    refused = {"problems": ["no model"], "notes": ["written again"]}
    replies += [job(refused), job(None, 1, "render: no tier"), job(None, -9)]
    assert next_attempt.start_problems(folder, 9.0, None) == ["no model"]
    assert "job: written again" in (folder.folder / "monitor.log").read_text()
    with pytest.raises(MonitorError, match=r"^no tier$"):
        next_attempt.start_problems(folder, 9.0, None)
    with pytest.raises(OSError, match="gave no result"):
        next_attempt.start_problems(folder, 9.0, None)
    replies.append(job(None, 1, "it timed out after 9 s", timed_out=True))  # killed by us on Windows
    with pytest.raises(OSError, match=r"^it timed out after 9 s$"):
        next_attempt.start_problems(folder, 9.0, None)
    own = RunFolder(tmp_path_factory.mktemp("own"))
    assert next_attempt.start_problems(own, 9.0, None) == []
    assert next_attempt.next_change(run_of(own), ["two"]) == {}
    changed = run_of(folder, changes=[ONE])
    assert next_attempt.next_change(changed, ["one"]) == {} and len(asked) == 4
    replies += [job({"name": "two", "refused": ["one: edited"]}), job(None, 1, "render: no tier")]
    assert next_attempt.next_change(changed, ["one", "two"]) == {"name": "two"}
    assert asked[-1] == {"want": "change", "ladder": ["two"], "changes": [ONE], "keeps": False}
    assert next_attempt.next_change(run, ["two"]) == {}
    log = (folder.folder / "monitor.log").read_text()
    assert "not_mitigated: one: edited" in log and "the run is not changed: no tier" in log


def test_a_script_that_the_disk_does_not_take_is_tried_again(data, tmp_path, monkeypatch, capsys):
    folder = folder_of(tmp_path)
    (folder / "train.attempt-2.sh").mkdir()
    request = {"want": "script", "number": 2, "resume": None, "changes": [], "was": []}
    monkeypatch.setattr(sys, "argv", ["", str(folder)])
    for number, name, code in ((2, "", 3), (3, "", 0), (3, "no_such", 1)):
        changes = [{"name": name}] if name else []
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request | {"number": number, "changes": changes})))
        assert next_attempt.main() == code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "line", "reason"),
    [
        ({}, "", ""),
        ({}, "python prepare.py\n", "the script was edited, and what it does before the training is not known"),
        ({"save_dir": "/var/tmp/fast"}, "", "the script copies its results when it ends"),
    ],
)
def test_a_script_of_which_two_must_not_run_at_once_says_why(data, tmp_path, fields, line, reason):
    folder = folder_of(tmp_path, **fields)
    script = folder / "train.sh"
    script.write_text(script.read_text().replace("set -eu\n", f"set -eu\n{line}"))
    next_attempt.respond(folder, {"want": "problems"})  # the start takes over what was edited
    assert len((folder / ".run-id").read_text()) == 32  # for `save_local`: later the disk may refuse it
    found = next_attempt.respond(folder, {"want": "text", "resume": folder / STAND_IN})
    copied_from = f"/var/tmp/fast/{folder.name}" if "save_dir" in fields else ""
    assert (found["alone"], found["save_dir"]) == (reason, copied_from)
    assert line in found["text"] and STAND_IN in found["text"]


@pytest.mark.parametrize("name", ["cat", "it's", "two words", "a\tb"])
def test_the_stand_in_of_a_prepared_script_is_found_whatever_the_folder_is_called(name):
    folder, state = Path("/runs") / name, Path("/runs") / name / "cat-step00000010-state"
    text = next_attempt.with_state(f"train --resume {quote(str(folder / STAND_IN))}\n", folder, state)
    assert text == f"train --resume {quote(str(state))}\n"


def test_a_run_in_a_folder_of_another_name_is_not_trained_for_a_lora_that_nobody_finds(data, tmp_path, monkeypatch):
    folder = folder_of(tmp_path)
    monkeypatch.setattr(next_attempt, "SCRIPT", "train.bat")
    made = (folder / "train.sh").read_text()
    for old, new in (("output_name ", "output_name my-"), (f"output_dir {folder}", f"output_dir {folder}/loras")):
        (folder / "train.sh").write_text(made.replace(old, new))
        (problem,) = next_attempt.respond(folder, {"want": "problems"})["problems"][-1:]
        assert problem.startswith(f"train.bat has --{new}") and "not found; set it to" in problem
    (folder / "train.sh").write_text(made)
    assert "not found" not in str(found := next_attempt.respond(folder, {"want": "problems"}))
    assert "rename the folder" not in str(found)
    (problem,) = next_attempt.respond(folder.rename(folder.with_name("dog")), {"want": "problems"})["problems"][-1:]
    name = folder.name
    assert problem.startswith(f"the folder dog has the run {name}: rename the folder to {name}, or, of a copy")
