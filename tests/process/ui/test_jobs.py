"""The table of background commands: one process a name, ended as a tree, known to a server that is started anew."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from ui_helpers import PROJECT, write_run
from ui_page import until

from runs import manage
from runs.files import RunError
from ui import jobs
from ui.dataset import draft

# Notes its pid, starts a process in a session of its own, waits for a file, and exits with a code.
PROGRAM = """
import os, subprocess, sys, time
folder, go, *code = sys.argv[1:]
print("working", flush=True)
print("to people", file=sys.stderr)
other = subprocess.Popen(["sleep", "300"], start_new_session=True)
with open(os.path.join(folder, "pids"), "a") as file:
    file.write(f"{os.getpid()} {other.pid}\\n")
while not os.path.exists(go):
    time.sleep(0.02)
other.kill()
print('{"ok": true}')
sys.exit(int(code[0]) if code else 0)
"""

# A server whose two threads start the command at the moment when its standard input ends.
SERVER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from ui import jobs
folder, go = sys.argv[1:]
print("ready", flush=True)
sys.stdin.read()
given = Path(folder), "work", ["job_program", folder, go], 60
with ThreadPoolExecutor(2) as pool:
    both = [pool.submit(jobs.start, *given, prepare=lambda: print("prepared")) for _ in range(2)]
for one in both:
    print(one.exception() or "started")
"""


@pytest.fixture
def folder(tmp_path, data, monkeypatch):
    (tmp_path / "job_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(PROJECT), os.environ.get("PYTHONPATH", "")]))
    place = tmp_path / "place"
    place.mkdir()
    (place / "pids").touch()
    yield place
    for pid in left(place):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pids(folder) -> list[list[int]]:
    """[its pid, that of the process it started] of each command that began."""
    return [[int(word) for word in line.split()] for line in (folder / "pids").read_text().splitlines()]


def left(folder) -> list[int]:
    """The processes of the commands that live."""
    started = {pid for pair in pids(folder) for pid in pair}
    living = (one for one in psutil.process_iter(["status"]) if one.info["status"] != psutil.STATUS_ZOMBIE)
    return [one.pid for one in living if one.pid in started]


@pytest.fixture
def words(folder, tmp_path) -> list[str]:
    """The command; it ends when tmp_path/"go" is there."""
    return ["job_program", str(folder), str(tmp_path / "go")]


def test_a_command_whose_process_was_killed_still_runs_and_can_be_cancelled(folder, words, tmp_path):
    jobs.start(folder, "work", words, 120)
    until(lambda: pids(folder), "the command runs")
    keeper = psutil.Process(json.loads((folder / ".jobs/work.json").read_text())["pid"])
    keeper.kill()
    psutil.wait_procs([keeper], 30)
    assert jobs.read(folder, "work").state == "running" and jobs.running(folder, "work")
    with pytest.raises(RunError, match="already running"):
        jobs.start(folder, "work", words, 120)
    jobs.cancel(folder, "work")
    assert jobs.read(folder, "work").state == "cancelled" and not jobs.running(folder, "work")
    assert not left(folder)
    (tmp_path / "go").touch()
    jobs.start(folder, "work", words, 120)
    assert jobs.wait(folder, "work", 60).state == "done"


def test_of_threads_of_several_servers_one_starts_the_command_and_cancel_leaves_nothing_of_it(folder, words):
    command = [sys.executable, "-c", SERVER, *words[1:]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    servers = [subprocess.Popen(command, **pipes, text=True, cwd=PROJECT) for _ in range(3)]
    assert [one.stdout.readline() for one in servers] == ["ready\n"] * 3
    for one in servers:
        one.stdin.close()
    said = sorted(line for one in servers for line in one.stdout.read().splitlines())
    assert said == ["It is already running"] * 5 + ["prepared", "started"]
    for one in servers:
        one.wait(60)
    until(lambda: pids(folder), "the command runs")
    jobs.cancel(folder, "work")  # this process is the next server
    assert jobs.wait(folder, "work", 60).state == "cancelled"
    until(lambda: not left(folder), "the command and its process in another session are gone")
    assert not jobs.running(folder, "work") and len(pids(folder)) == 1


def test_cancel_leaves_nothing_of_a_command_where_a_signal_kills_at_once(folder, words, monkeypatch):
    """As on Windows, where no process inherits a lock either."""
    monkeypatch.setattr(jobs, "POSIX", False)
    monkeypatch.setattr(jobs.platform, "send", lambda pid, start, number: os.kill(pid, signal.SIGKILL) is None)
    jobs.start(folder, "work", words, 120)
    assert jobs.running(folder, "work"), "its process has the lock"
    until(lambda: pids(folder), "the command runs")
    jobs.cancel(folder, "work")
    assert jobs.read(folder, "work").state == "cancelled"
    until(lambda: not left(folder), "the command and its process in another session are gone")


@pytest.mark.parametrize(("code", "state"), [("0", "done"), ("3", "failed")])
def test_a_job_is_read_while_it_runs_and_after_it(folder, words, tmp_path, code, state):
    jobs.start(folder, "work", [*words, code], 120)
    until(lambda: "working" in jobs.output(folder, "work")[0], "its first line is there")
    assert jobs.at_work(folder) == ["work"]
    (tmp_path / "go").touch()
    assert jobs.wait(folder, "work", 60).state == state
    text, value, errors = jobs.output(folder, "work")
    assert text.strip() == "working" and value == {"ok": True} and errors.strip() == "to people"
    assert jobs.at_work(folder) == [] and jobs.read(folder, "other") is None


def test_a_job_over_its_limit_is_ended_and_one_that_is_killed_with_its_command_is_lost(folder, words):
    jobs.start(folder, "work", words, 0.5)
    assert jobs.wait(folder, "work", 60).state == "failed" and "took longer than" in jobs.output(folder, "work")[2]
    jobs.start(folder, "work", words, 60)
    until(lambda: len(pids(folder)) == 2, "the second command runs")
    keeper = psutil.Process(json.loads((folder / ".jobs/work.json").read_text())["pid"])
    for one in [keeper, *keeper.children()]:
        one.kill()
    until(lambda: jobs.read(folder, "work").state == "lost", "its end was not seen")


def test_a_run_is_not_deleted_while_a_command_works_in_it(data, words, tmp_path):
    run = write_run(data, "cat", state="completed")
    jobs.start(run, "publish", words, 120)
    with pytest.raises(RunError, match="'publish' is working in cat; cancel it, or wait until it has ended"):
        manage.delete("cat", jobs.idle)
    assert (run / "run.toml").is_file()
    (tmp_path / "go").touch()
    assert jobs.wait(run, "publish", 60).state == "done"
    manage.delete("cat", jobs.idle)
    assert not run.exists()


def test_no_command_is_started_for_a_run_that_was_deleted(data):
    """As from a page that was not drawn again yet: the folder that it made kept the run's name taken."""
    folder = write_run(data, "cat", state="stopped")
    manage.delete(folder, jobs.idle)
    with pytest.raises(RunError, match="The run cat was deleted"):
        jobs.start(folder, "work", ["job_program"], 60)
    assert not folder.exists()


def test_a_draft_at_which_a_command_works_is_not_cleaned(words, tmp_path):
    """A laptop that slept for months wakes up, and its server is started anew."""
    mine = draft.new_id()
    draft.save_fields(mine, {"name": "x"})
    new = draft.folder(mine) / ".new-0"
    new.mkdir()
    jobs.start(draft.folder(mine), "work", words, 120)

    def clean_after_months() -> None:
        for path in (new, *draft.folder(mine).glob("draft.sqlite*")):
            os.utime(path, (time.time() - 2 * draft.DRAFT_EXPIRES_S,) * 2)
        draft.delete_expired()

    clean_after_months()
    assert new.is_dir() and draft.form(mine) == {"name": "x"}
    (tmp_path / "go").touch()
    assert jobs.wait(draft.folder(mine), "work", 60).state == "done"
    clean_after_months()
    assert not draft.folder(mine).exists()
