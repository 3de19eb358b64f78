"""Processes and locks: who belongs to a run, who holds what, and how it ended."""

import os
import subprocess
import sys

import pytest
from monitor_helpers import ROOT, wait_for

from monitor import system, tree
from monitor.attempt import Exit
from monitor.locks import Lock, is_held

LINUX = sys.platform.startswith("linux")


def test_a_process_is_known_by_number_and_start():
    child = subprocess.Popen(["sleep", "60"])
    start = system.proc(child.pid).start
    assert system.alive(child.pid, start) and not system.alive(child.pid, start + 1)
    assert not system.send(child.pid, start + 1, 15), "a number that was used again is not ours to signal"
    child.kill()
    wait_for(lambda: system.proc(child.pid).dead, what="a zombie is dead")
    assert not system.alive(child.pid, start)
    child.wait()
    assert system.proc(child.pid) is None


@pytest.mark.skipif(not LINUX, reason="/proc/PID/environ")
def test_processes_are_found_by_the_token_they_inherited_and_ended():
    env = {**os.environ, tree.TOKEN: "test-token-1"}
    child = subprocess.Popen(["bash", "-c", "trap '' TERM; sleep 61 & wait; wait"], env=env, start_new_session=True)
    found = tree.Tree("test-token-1", (child.pid, system.proc(child.pid).start))
    wait_for(lambda: len(found.refresh()) == 2)
    ended = tree.end(found, grace_s=0.3, kill_wait_s=60)
    assert {p.name for p in ended.killed} == {"bash", "sleep"} and ended.left == ()
    assert child.wait(60) == -9, "parents are ended first"


def test_a_lock_goes_with_its_holder(tmp_path):
    path = tmp_path / "lock"
    code = f"from monitor.locks import Lock; from pathlib import Path; import time; assert Lock(Path({str(path)!r})).acquire(); print(1, flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    holder.stdout.readline()
    mine = Lock(path)
    assert is_held(path) and not mine.acquire()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert not is_held(path)
    assert mine.acquire(patience_s=30)
    assert not Lock(path).acquire()
    mine.release()


def test_exit_codes_and_last_words():
    assert Exit(0, None, "", "").done, "a script without heartbeats"
    assert not Exit(0, None, "running", "").done, "exit code 0 alone does not count"
    assert Exit(1, None, "done", "").done, "a launcher's code is only a hint"
    assert str(Exit(137, 9, "running", "")) == "ended by SIGKILL"
    assert "waited for a batch" in str(Exit(75, None, "deadline", "waited for a batch"))
