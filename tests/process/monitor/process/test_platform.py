"""What the system says of processes, signals, private folders and locks, and what happens when it cannot say."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import children
import pytest
from fault_actions import with_pids
from monitor_helpers import wait_for
from proc_helpers import failing, linux, start_of

from monitor.process import platform, spawned
from monitor.process.platform import Lock, is_held

MARK = f"test-{os.getpid()}"  # the token: another run of these tests has another one


def test_a_process_is_known_by_number_and_start(child):
    start = start_of(child)
    assert platform.alive(child.pid, start) and not platform.alive(child.pid, start + 1)
    assert not platform.send(child.pid, start + 1, 15), "a reused pid must not be signalled"
    child.kill()
    wait_for(lambda: platform.process_info(child.pid).dead, what="a zombie is dead")
    assert not platform.alive(child.pid, start)
    child.wait()
    assert platform.process_info(child.pid) is None


FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=lambda: time.sleep(60)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@linux
def test_a_process_lives_until_its_last_thread_has_ended(spawn):
    """The kernel shows it as a zombie as soon as its first thread has; what it has open is still locked."""
    process = spawn(sys.executable, "-c", FIRST_THREAD_ENDS)
    stat = f"/proc/{process.pid}/stat"
    wait_for(lambda: platform.read_bytes(stat).rpartition(b")")[2].split()[0] == b"Z", what="its first thread ends")
    found = platform.process_info(process.pid)
    assert not found.dead and platform.alive(process.pid, found.start)
    process.kill()
    wait_for(lambda: platform.process_info(process.pid).dead, what="the end of the process")


@linux
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOMEM])
def test_a_process_that_cannot_be_read_is_not_dead(monkeypatch, child, number):
    start = start_of(child)
    failing(monkeypatch, f"/{child.pid}/stat", number)
    for call in (platform.scan, lambda: platform.alive(child.pid, start), lambda: platform.send(child.pid, start, 9)):
        with pytest.raises(OSError):
            call()
    assert child.poll() is None, "nobody knows whether it is the same process"


@linux
def test_a_process_number_that_is_used_again_is_never_hit(monkeypatch, child, request):
    """The process dies after it was found alive and before the signal is sent, and another one gets its number."""
    start, alive, others = start_of(child), platform.alive, []

    def dies_after(pid, started):
        found = alive(pid, started)
        child.kill()
        child.wait()
        with contextlib.suppress(OSError):
            others.extend(with_pids([pid]))
        return found

    monkeypatch.setattr(platform, "alive", dies_after)
    sent = platform.send(child.pid, start, signal.SIGKILL)
    if not others:
        pytest.skip("only root can choose the number of a process")
    request.addfinalizer(others[0].kill)
    with pytest.raises(subprocess.TimeoutExpired):
        others[0].wait(0.2)
    assert not sent


@linux
def test_an_exit_code_that_somebody_waits_for_survives_the_reaping_of_orphans():
    """In a process of its own, which adopts orphans as the monitor does."""
    code = """
import subprocess, sys, time
from monitor.process import platform
platform.become_subreaper()
known = platform.popen(["sh", "-c", "exit 7"])
subprocess.run(["sh", "-c", "for i in 1 2 3 4 5; do sleep 0.1 & done"])
until = time.monotonic() + 60
while [p for p in platform.scan().values() if p.ppid == platform.os.getpid()]:
    assert time.monotonic() < until, platform.scan()
    time.sleep(0.05)
    platform.reap()
print(known.wait())
"""
    done = children.run(code)
    assert done.stdout == "7\n", done.stderr


@linux
def test_an_environment_that_cannot_be_read_is_not_an_empty_one(monkeypatch, child):
    path = f"/{child.pid}/environ"
    for number in (errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM):
        with monkeypatch.context() as context:
            failing(context, path, number)
            assert platform.environ_of(child.pid) == {}
    failing(monkeypatch, path, errno.EIO)
    for read, *given in ((platform.environ_of, child.pid), (spawned.with_environment, "X", "x"), (spawned.orphans,)):
        with pytest.raises(OSError):
            read(*given)
    failing(monkeypatch, "", errno.ENOENT)
    assert platform.boot_id() == "", "and a boot whose name cannot be read is unknown"


@linux
def test_a_container_that_is_started_again_is_another_boot_of_its_machine(monkeypatch):
    machine, first, names = platform.reading.boot_id(), platform.process_info(os.getpid()), []
    for start in (20, 900_000, 950_000):
        monkeypatch.setattr(platform, "process_info", lambda pid, start=start: replace(first, start=start))
        names.append(platform.boot_id())
    assert names[0] == machine and len({*names}) == 3 and all(name[:8] == machine[:8] for name in names)


def test_a_private_folder_is_ours_alone_and_listed_without_what_others_made(tmp_path, monkeypatch):
    folder = platform.private_folder("a run", tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "hangproof-link").symlink_to(tmp_path / "elsewhere")
    assert platform.private_folders(tmp_path) == [folder]
    platform.drop_private(tmp_path / "elsewhere")
    with monkeypatch.context() as another:
        another.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        assert platform.private_folders(tmp_path) == []
    platform.drop_private(folder)
    assert not folder.exists() and (tmp_path / "elsewhere").exists()


@linux
def test_a_waker_sleeps_its_time_and_wakes_when_a_child_exits_or_a_signal_handler_says_so():
    waker = platform.Waker()

    def slept_s(limit_s):
        began = time.monotonic()
        waker.sleep(limit_s)
        return time.monotonic() - began

    assert slept_s(0.2) >= 0.19
    process = subprocess.Popen(["sleep", "0.2"])
    assert slept_s(60) < 50
    process.wait()
    before = signal.signal(signal.SIGALRM, lambda *_: waker.wake())
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    assert slept_s(60) < 50
    signal.signal(signal.SIGALRM, before)
    for _ in range(3):
        waker.wake()
    waker.sleep(60)
    assert slept_s(0.2) >= 0.19, "several wakes end one sleep"


def test_a_lock_goes_with_its_holder_and_a_disk_without_locks_is_named(tmp_path, spawn, monkeypatch):
    path = tmp_path / "lock"
    code = "import sys, time; from monitor.process.platform import Lock, Path; lock = Lock(Path(sys.argv[1]))"
    holder = spawn(sys.executable, "-c", f"{code}; print(lock.acquire(), flush=True); time.sleep(60)", str(path))
    assert holder.stdout.readline() == "True\n"
    mine = Lock(path)
    assert is_held(path) and not mine.acquire()
    with pytest.raises(RuntimeError, match="not held"):
        _ = mine.handle
    holder.kill()
    holder.wait()
    assert not is_held(path)
    assert mine.acquire(patience_s=30)
    assert not Lock(path).acquire()
    mine.write("held by a longer text")
    mine.write("held by 7")
    assert path.read_text() == "held by 7"
    mine.release()
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(platform.NoLocks, match="the data folder's disk has no file locks"):
        mine.acquire()
    assert not is_held(path)


def test_a_lock_that_is_only_probed_is_taken_as_soon_as_the_probe_is_over(tmp_path):
    path = tmp_path / "lock"
    mine, probe = Lock(path), os.open(path, os.O_RDWR | os.O_CREAT)
    assert platform._lock(probe, shared=True) and is_held(path) is False, "probes do not exclude each other"
    over = threading.Timer(0.2, os.close, [probe])
    over.start()
    assert mine.acquire()
    over.join()
    mine.release()


@linux
def test_a_lock_on_a_file_removed_meanwhile_is_taken_again_on_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    first, lock = [True], platform._lock

    def removed_before(handle, shared=False):
        if first.pop() if first else False:
            path.unlink()
        return lock(handle, shared)

    monkeypatch.setattr(platform, "_lock", removed_before)
    mine = Lock(path)
    assert mine.acquire() and path.exists() and is_held(path)
    mine.release()
    assert not is_held(path)


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_it_imports_and_works_without_linux(system, tmp_path):
    """The modules of another system are missing, and psutil reads the processes."""
    code = f"""
import contextlib, os, pathlib, random, signal, subprocess, sys, tempfile, threading, psutil
tempfile.tempdir = {str(tmp_path)!r}
sys.platform = {system!r}
if sys.platform == "win32":
    sys.modules["fcntl"] = None
    subprocess.CREATE_NEW_PROCESS_GROUP, subprocess.CREATE_NO_WINDOW = 0x200, 0x8000000
    for name in ("getuid", "sysconf", "killpg", "pidfd_open", "waitpid", "set_blocking"):
        delattr(os, name)
    del signal.SIGKILL, signal.SIGCONT
from monitor.process import platform, spawned
from monitor import gpu
child = subprocess.Popen(["sleep", "60"], env={{**os.environ, spawned.TOKEN: {MARK!r}}})
print(platform.alive(child.pid, platform.process_info(child.pid).start), platform.process_info(1 << 22))
print(len(spawned.Tree({MARK!r}).refresh()), platform.command_of(child.pid), platform.catches(child.pid, 9))
platform.Waker().sleep(0.01)
platform.private_folder("x")
start = platform.process_info(child.pid).start
psutil.Process.create_time = lambda self: 7.0  # as macOS says it after somebody has set the clock
print(platform.alive(child.pid, start), platform.detached())
os.kill(child.pid, 9)
"""
    run = children.run(code)
    assert run.returncode == 0, run.stderr
    options = {"creationflags": 0x8000200} if system == "win32" else {"start_new_session": True}
    assert run.stdout.splitlines() == ["True None", "1 sleep 60 True", f"True {options}"]
