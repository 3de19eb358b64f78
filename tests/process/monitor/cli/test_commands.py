"""What the commands about a run print, and what they refuse."""

import argparse
import errno
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from unittest import mock

import children
import pytest
from monitor_helpers import STATUS, finish, monitor, toy_run, wait_for
from run_facts import status, step_of
from toys import fault_at
from ui_helpers import write_run

from monitor.cli import commands
from monitor.process import spawned
from monitor.process.platform import Lock
from monitor.run_folder import MonitorError, RunFolder

LINUX = sys.platform.startswith("linux")


def test_the_runs_are_shown_until_all_have_ended(tmp_path, capsys):
    folder = toy_run(tmp_path / "toy")
    RunFolder(folder).write_status(STATUS)
    assert commands.watch([folder, tmp_path / "other"], 0.0) == 0
    shown = capsys.readouterr().out
    assert "step 12 of 100" in shown and "not watched" in shown and "other: not started" in shown


RING = {"step": 40, "bytes": 3 * 10**9, "every": 1}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "running (training), step 12 of 100, 44.0 s left, 1 restart"),
        ({"planned_steps": 0, "eta_s": None, "restarts": 0, "phase": None}, "running, step 12"),
        ({"alive": False}, "running (not watched; start it again) (training), step 12 of 100, 44.0 s left, 1 restart"),
        ({"stale": "old"}, "running (old) (training), step 12 of 100, 44.0 s left, 1 restart"),
        ({"state": "failed", "message": "no GPU", "snapshots": RING}, "failed. no GPU"),
        ({"state": "paused", "message": "paused at step 3"}, ": paused at step 3"),
        ({"message": "so far"}, "44.0 s left, 1 restart. so far"),
        ({"store": {"step": 0, "error": "no answer"}}, ", 1 restart, step 0 in the store, store: no answer"),
        ({"snapshots": RING}, ", 1 restart, snapshot of step 40 in memory (3.0 GB, at every step)"),
        ({"snapshots": {**RING, "every": 2000}}, ", snapshot of step 40 in memory (3.0 GB, every 2,000 steps)"),
        ({"snapshots": {"step": 7, "off": "no room"}}, ", 1 restart, snapshots in memory are off: no room"),
        ({"snapshots": {"step": None}}, ", 1 restart"),
        ({"snapshots": RING, "state": "backoff"}, "backoff (training), step 12 of 100, 44.0 s left, 1 restart"),
        ({"standby": {"state": "ready", "memory_bytes": 2 * 10**9}}, ", 1 restart, next attempt ready (2.0 GB)"),
        ({"standby": {"state": "starting"}}, ", 1 restart, next attempt starting"),
        ({"standby": {"state": "none", "reason": "memory is short"}}, ", no standby attempt: memory is short"),
        ({"phase": "x"}, "; a start of the run writes it again"),  # edited by hand, or from another version
        ({"store": 1}, "; a start of the run writes it again"),
        ({"slow": {1: 2}}, "; a start of the run writes it again"),
    ],
)
def test_a_run_is_shown_in_one_line(changed, expected):
    shown = commands.line(Path("toy"), {**STATUS, **changed})
    assert shown.startswith("toy: ") and shown.endswith(expected), shown
    assert not expected.startswith(tuple("rfb")) or shown == f"toy: {expected}"


def test_what_is_asked_of_a_run_that_cannot_do_it_is_refused_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    year = toy_run(tmp_path / "outputs" / "2026")
    with pytest.raises(MonitorError, match="2026 is not running"):  # a run, not the process of that number
        commands.diagnose(argparse.Namespace(run=year.name))
    folder = toy_run(tmp_path / "toy")
    with pytest.raises(MonitorError, match=r"is not running \(never started\)"):
        commands.ask_to_end(folder, {})
    for state in ("stopped", "running"):  # of the latter, the monitor died
        (folder / "status.json").write_text(json.dumps({"state": state}))
        why = rf"is not running \(last state: {state}, no reason is recorded\); a checkpoint can"
        with pytest.raises(MonitorError, match=why):
            commands.request(folder, "save")
    (folder / "status.json").unlink()
    prompts = folder / "sample_prompts.txt"
    prompts.write_text(" \n")
    lock = Lock(folder / "monitor.lock")
    assert lock.acquire()
    try:
        for every, state, kind, why in (
            (9, "failed", "save", "is not running .last state: failed"), (9, "stopping", "save", "is stopping: so far"),
            (9, "running", "sample", "no sample images; set prompts in"), (0, "running", "sample", "prompts and sample_every_n_steps"),
        ):  # fmt: skip
            (folder / "run.toml").write_text(f'name = "toy"\nsample_every_n_steps = {every}\n')
            RunFolder(folder).write_status({**STATUS, "state": state, "message": "so far"})
            with pytest.raises(MonitorError, match=why):
                commands.request(folder, kind)
        with pytest.raises(MonitorError, match="is running, and no training process of it is on this machine now"):
            commands.diagnose(argparse.Namespace(run=str(folder)))
        prompts.write_text("café", encoding="latin-1")  # as an editor of Windows may save it
        (folder / "run.toml").write_text('name = "toy"\nsample_every_n_steps = 9\n')
        assert commands.request(folder, "sample")
        name = commands.request(folder, "save")
        assert commands.request(folder, "save") == name and commands.outcome(folder, name) is None
        (folder / "events.jsonl").write_text("{\n" + json.dumps({"kind": "request", "id": name, "done": True}) + "\n")
        assert commands.outcome(folder, name)["done"]
        assert commands.ask_to_end(folder, {"now": True}) and RunFolder(folder).stop_request() == {"now": True}
        RunFolder(folder).write_status({**STATUS, "monitor_pid": 77})
        watched = {"folder": str(folder), "pid": 77, "already": True}
        assert commands.launch(folder) == watched
        free = iter([True])  # at the first look: Start is pressed twice at the same moment
        monkeypatch.setattr(commands, "is_held", lambda path: not next(free, False))
        monkeypatch.setattr(commands, "start_problems", lambda *_: [])
        assert commands.launch(folder) == watched
    finally:
        lock.release()


def test_a_start_on_a_full_disk_says_why_it_failed_or_that_the_run_is_watched(tmp_path, monkeypatch):
    folder, keeper = toy_run(tmp_path / "toy"), mock.Mock(pid=7, poll=lambda: None)
    monkeypatch.setattr(commands, "START_S", 0.05)
    monkeypatch.setattr(commands.subprocess, "Popen", lambda *_, **__: keeper)
    with pytest.raises(MonitorError, match="does not respond"):
        commands.launch(folder)
    with monkeypatch.context() as patch, pytest.raises(MonitorError, match="cannot write to .*the disk is full"):
        keeper.poll = lambda: 1
        full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        patch.setattr(tempfile, "TemporaryFile", full)
        commands.launch(folder)
    keeper.poll = lambda: None
    monkeypatch.setattr(commands, "is_held", mock.Mock(side_effect=[False, True]))
    assert commands.launch(folder) == {"folder": str(folder), "pid": 7, "already": False}


def test_a_busy_machine_on_which_the_check_takes_too_long_refuses_no_start(tmp_path, monkeypatch):
    folder, popen = toy_run(tmp_path / "toy"), mock.Mock(return_value=mock.Mock(pid=7, poll=lambda: None))
    monkeypatch.setattr(commands, "START_S", 0.05)
    monkeypatch.setattr(commands, "start_problems", mock.Mock(side_effect=OSError("timed out after 20 s")))
    monkeypatch.setattr(commands.subprocess, "Popen", popen)
    monkeypatch.setattr(commands, "is_held", mock.Mock(side_effect=[False, True]))
    assert commands.launch(folder)["pid"] == 7
    assert popen.call_args.kwargs["env"][commands.CHECKED] == commands.START + commands.UNCHECKED


@pytest.mark.skipif(not LINUX, reason="/proc")
def test_a_stop_reaches_the_monitor_of_a_run_whose_disk_takes_no_request(tmp_path, monkeypatch):
    folder = toy_run(tmp_path / "toy")
    waits = "import signal, time; signal.signal(2, signal.SIG_DFL); print('ready', flush=True); time.sleep(600)"
    lock = Lock(folder / "monitor.lock")
    assert lock.acquire()
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(commands, "atomic_write", full)
    with subprocess.Popen([sys.executable, "-c", waits, "--child", "1", f"{folder}-2"]) as other:
        with pytest.raises(OSError, match="No space"):
            commands.ask_to_end(folder, {"now": False})
        command = [sys.executable, "-c", waits, "--child", "1", str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as monitor:
            assert monitor.stdout.readline() == b"ready\n"
            assert commands.ask_to_end(folder, {"now": False}) and monitor.wait(60) == -signal.SIGINT
            with pytest.raises(OSError, match="No space"):
                commands.ask_to_end(folder, {"pause": True})
        assert other.poll() is None
        other.kill()
    lock.release()


@pytest.mark.skipif(not LINUX, reason="/proc")
def test_a_stop_that_kills_what_no_monitor_knows_answers_as_any_other(tmp_path, spawn, capsys):
    folder = toy_run(tmp_path / "toy")
    process = spawn(**{spawned.RUN: str(folder), spawned.TOKEN: "0" * 32})
    asked = argparse.Namespace(run=str(folder), command="stop", now=False, wait=0.0)
    assert commands.stop(asked) == (0, {"folder": str(folder), "state": None})
    assert process.wait(10) and "killed 1 process that no monitor watched" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="/proc")
def test_diagnose_explains_a_living_run_and_any_process(folder):
    toy_run(folder, fault_at(5, "time.sleep(3600)"))
    process = monitor(folder, limits="[phases.step]\nfloor_s = 600\n[check]\nstack_dump_s = 20\n")
    wait_for(lambda: step_of(folder) == 5)
    code, out, _ = finish(monitor(folder, "diagnose", "--json"))
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert found["summary"] == "no progress" and found["step"] == 5
    assert "fault (toy.py" in found["where"] and "fault" in out
    pid, limits = found["processes"][-1]["pid"], str(folder.parent / "limits.toml")
    code, out, _ = finish(monitor(Path(str(pid)), "diagnose", HANGPROOF_LIMITS=limits))
    assert code == 0 and "no progress" in out and "hrtimer_nanosleep" in out
    (folder / "stop.request").write_text('{"now": true}')
    finish(process)
    assert status(folder)["state"] == "stopped"
    code, _, err = finish(monitor(folder, "diagnose"))
    assert code == 1 and "is not running" in err


NUMBER = 30
# Runs a command and prints which files of runs it opened.
WATCHED = """
import json, os, runpy, sys
opened, outputs = [], os.environ["HANGPROOF_DATA"] + os.sep + "outputs" + os.sep
sys.addaudithook(lambda name, args: opened.append(str(args[0])) if name == "open" and str(args[0]).startswith(outputs) else None)
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print(json.dumps([path.removeprefix(outputs) for path in opened]), file=sys.stderr)
"""


def test_a_command_shows_every_run_and_opens_each_file_once(tmp_path):
    for number in range(NUMBER):
        run = write_run(tmp_path, f"run-{number:03}", ("completed", "failed", "stopped")[number % 3], message="")
        for name in ("train.sh", "metrics.jsonl", "events.jsonl", "monitor.lock"):
            (run / name).touch()
    each = {"status.json": NUMBER, "monitor.lock": NUMBER}
    for words, opened, shown in (
        ("runs show", {}, NUMBER),
        ("monitor status", each, NUMBER),
        ("monitor resume-all", {**each, ".queue.json": 1}, 0),
    ):
        done = children.run(WATCHED, *words.split(), "--json", HANGPROOF_DATA=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        files = json.loads(done.stderr.splitlines()[-1])
        assert Counter(Path(path).name for path in files) == opened and len(files) == len({*files})
        answer = json.loads(done.stdout.splitlines()[-1])
        assert len(answer["runs"] if words == "runs show" else answer) == shown


def test_interrupted_runs_are_started_at_once_and_one_that_cannot_be_keeps_no_other_from_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    for name, state in (*dict.fromkeys("abc", "running").items(), ("done", "completed"), ("left", "stopped")):
        (write_run(tmp_path, name, state=state) / "train.sh").touch()
    together = threading.Barrier(3)

    def launch(folder: Path, how: str):
        together.wait(60)
        if folder.name == "b":
            raise MonitorError("b: the monitor ended at once")
        return {"folder": str(folder), "pid": 7, "already": False}

    monkeypatch.setattr(commands, "launch", launch)
    code, started = commands.resume_all(argparse.Namespace())
    assert code == 1 and [Path(one["folder"]).name for one in started] == ["a", "c"]
    said = capsys.readouterr()
    assert said.out == "a: watched by process 7\nc: watched by process 7\n"
    assert said.err == "monitor: b: the monitor ended at once\n"
