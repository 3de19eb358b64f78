"""Stacks of stuck processes: what is read from them, and tools that hang, are denied or are missing."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from monitor_evidence import frames
from monitor_helpers import wait_for

from guards.crash import stacks_path
from monitor.detect import probe
from monitor.process import platform

LINUX = sys.platform.startswith("linux")
GUARDED = "import sys, time; from guards import crash; crash.enable_stacks(sys.argv[1]); print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def guarded(tmp_path, spawn):
    """A process of ours that writes its stacks on SIGUSR2."""
    child = spawn(sys.executable, "-c", GUARDED, str(tmp_path))
    assert child.stdout.readline() == "ready\n"
    return child


def key(child: subprocess.Popen) -> tuple[int, float]:
    return child.pid, platform.process_info(child.pid).start


def test_names_and_places_are_read_from_faulthandler_and_from_py_spy():
    text = frames("threading.py:wait", "loop.py:one_step")
    assert [frame.name for frame in probe.frames(text)] == ["threading.py:wait", "loop.py:one_step"]
    assert probe.where(text) == "wait (threading.py:1)"
    spy = 'Thread 7 (idle): "MainThread"\n    wait (threading.py:327)\n    one_step (trainer/loop.py:80)\n'
    assert [frame.name for frame in probe.frames(spy)] == ["threading.py:wait", "loop.py:one_step"]
    assert probe.where(spy) == "wait (threading.py:327)"
    assert probe.where("py-spy is not installed") == ""
    other = 'Thread 0x00007e (most recent call first):\n  File "/x/selectors.py", line 415 in select\n\n'
    assert probe.where(other + text) == "wait (threading.py:1)"
    assert probe.where(other) == "", "cut off before the main thread"


@pytest.mark.skipif(not LINUX, reason="SigCgt is in /proc")
@pytest.mark.parametrize("reused", [False, True])
def test_no_signal_is_sent_to_a_process_that_has_no_handler_for_it(child, tmp_path, reused):
    """SIGUSR2 would kill it. Fault 15: the stacks file of a former process is there, another program has its pid."""
    if reused:
        stacks_path(tmp_path, child.pid).write_text("stacks of the process that had this pid\n")
    assert probe.dump(tmp_path, [key(child)], 0.2) == {}
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.2)


@pytest.mark.skipif(not LINUX, reason="SIGUSR2 is not on Windows")
def test_a_guarded_process_answers_with_its_stacks(guarded, tmp_path):
    found = probe.dump(tmp_path, [key(guarded)], 20.0)
    assert probe.where(found[guarded.pid]).startswith("<module>")
    assert guarded.poll() is None


@pytest.mark.skipif(not LINUX, reason="SIGUSR2 is not on Windows")
@pytest.mark.parametrize("vanishes", [True, False])
def test_a_stacks_file_that_vanishes_or_cannot_be_read_meanwhile_is_no_error(guarded, tmp_path, monkeypatch, vanishes):
    real, calls = os.path.getsize, []

    def getsize(path):
        calls.append(path)
        if len(calls) > 1 and not vanishes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if len(calls) > 1:
            Path(path).unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(os.path, "getsize", getsize)
    assert probe.dump(tmp_path, [key(guarded)], 2.0) == {}
    assert len(calls) > 1


def test_the_dump_of_a_fatal_signal_is_found_behind_dumps_on_request(tmp_path):
    assert probe.fatal_dump(tmp_path, 7) == ""
    stacks_path(tmp_path, 7).write_text(frames("loop.py:one_step") + "\n")
    assert probe.fatal_dump(tmp_path, 7) == ""
    with open(stacks_path(tmp_path, 7), "a") as file:
        file.write("x" * (1 << 17) + "\nFatal Python error: Segmentation fault\n\n" + frames("loop.py:one_step"))
    assert probe.fatal_dump(tmp_path, 7).startswith("Fatal Python error: Segmentation fault")


@pytest.fixture
def py_spy(tmp_path, monkeypatch):
    """Puts this shell script in the place of py-spy."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    def write(script: str) -> None:
        (tmp_path / "bin" / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / "py-spy").chmod(0o755)

    return write


def test_py_spy_is_killed_when_the_probe_ends(py_spy, tmp_path, child):
    py_spy(f"echo $$ > {tmp_path}/pid; exec sleep 600")
    spy = probe.PySpy(60.0)
    spy.begin(*key(child))
    pid = int(wait_for(lambda: (tmp_path / "pid").read_text().strip()))
    spy.close()
    wait_for(lambda: (info := platform.process_info(pid)) is None or info.dead)
    assert not spy.poll()


@pytest.mark.skipif(not LINUX, reason="the stand-in for py-spy is a shell script")
@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("sleep 60", "timed out"),
        ("echo 'Permission Denied: Try running again with elevated permissions'; exit 1", "Permission Denied"),
        ("kill -STOP $4; echo 'Thread 1: MainThread'", "MainThread"),
        (None, "not installed"),
    ],
)
def test_py_spy_that_hangs_is_denied_missing_or_leaves_its_target_stopped(py_spy, child, script, answer):
    if script:
        py_spy(script)
    spy = probe.PySpy(timeout_s=0.5 if script == "sleep 60" else 60)
    spy.begin(*key(child))
    wait_for(lambda: not spy.poll())
    assert answer in spy.texts[child.pid]
    wait_for(lambda: platform.process_info(child.pid).state == "S", what="the target runs again")
