"""Stacks of stuck processes: what is read from them, and tools that hang, are denied or are missing."""

import subprocess
import sys

import pytest
from monitor_evidence import frames
from monitor_helpers import wait_for

from monitor import stacks, system

LINUX = sys.platform.startswith("linux")


def test_names_and_places_are_read_from_faulthandler_and_from_py_spy():
    text = frames("threading.py:wait", "loop.py:one_step")
    assert stacks.names(text) == ["threading.py:wait", "loop.py:one_step"]
    assert stacks.where(text) == "wait (threading.py:1)"
    spy = 'Thread 7 (idle): "MainThread"\n    wait (threading.py:327)\n    one_step (trainer/loop.py:80)\n'
    assert stacks.names(spy) == ["threading.py:wait", "loop.py:one_step"]
    assert stacks.where(spy) == "wait (threading.py:327)"
    assert stacks.where("py-spy is not installed") == ""
    other = 'Thread 0x00007e (most recent call first):\n  File "/x/selectors.py", line 415 in select\n\n'
    assert stacks.where(other + text) == "wait (threading.py:1)"
    assert stacks.where(other) == "", "cut off before the main thread"


def test_no_signal_is_sent_to_a_process_that_has_no_handler_for_it(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert stacks.dump(tmp_path, [(child.pid, system.proc(child.pid).start)], 0.2) == {}
        assert child.poll() is None, "SIGUSR2 without a handler would have ended it"
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(not LINUX, reason="the stand-in for py-spy is a shell script")
@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("sleep 60", "no answer within"),
        ("echo 'Permission Denied: Try running again with elevated permissions'; exit 1", "Permission Denied"),
        ("kill -STOP $4; echo 'Thread 1: MainThread'", "MainThread"),
        (None, "not installed"),
    ],
)
def test_py_spy_that_hangs_is_denied_missing_or_leaves_its_target_stopped(tmp_path, monkeypatch, script, answer):
    (tmp_path / "bin").mkdir()
    if script:
        (tmp_path / "bin" / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / "py-spy").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    child = subprocess.Popen(["sleep", "60"])
    try:
        spy = stacks.PySpy(timeout_s=0.5 if script == "sleep 60" else 60)
        spy.begin(child.pid, system.proc(child.pid).start)
        wait_for(lambda: not spy.poll())
        assert answer in spy.texts[child.pid]
        wait_for(lambda: system.proc(child.pid).state == "S", what="the target runs again")
    finally:
        child.kill()
        child.wait()
