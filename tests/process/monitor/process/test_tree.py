"""Processes and locks: who belongs to a run, who holds what, and what happens when the system cannot say."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from monitor_helpers import ROOT, wait_for

from monitor.process import locks, platform, tree
from monitor.process.locks import Lock, is_held

LINUX = sys.platform.startswith("linux")
linux = pytest.mark.skipif(not LINUX, reason="/proc")
MARK = f"test-{os.getpid()}-"  # of the tokens: another run of these tests has other ones


@pytest.fixture
def child():
    """A process that does nothing."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def error(number):
    return OSError(number, os.strerror(number))


def failing(monkeypatch, suffix, number):
    """Reading files of /proc whose path ends in `suffix` fails."""
    read = platform.read_bytes

    def broken(path):
        if path.endswith(suffix):
            raise error(number)
        return read(path)

    monkeypatch.setattr(platform, "read_bytes", broken)


def test_a_process_is_known_by_number_and_start(child):
    start = platform.process_info(child.pid).start
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
def test_a_process_lives_until_its_last_thread_has_ended():
    """The kernel shows it as a zombie as soon as its first thread has; what it has open is still locked."""
    process = subprocess.Popen([sys.executable, "-c", FIRST_THREAD_ENDS])
    try:
        stat = f"/proc/{process.pid}/stat"
        wait_for(
            lambda: platform.read_bytes(stat).rpartition(b")")[2].split()[0] == b"Z", what="the end of the first thread"
        )
        found = platform.process_info(process.pid)
        assert not found.dead and platform.alive(process.pid, found.start)
    finally:
        process.kill()
    wait_for(lambda: platform.process_info(process.pid).dead, what="the end of the process")
    process.wait()


@pytest.mark.slow
@linux
def test_processes_that_exit_during_a_scan_are_left_out():
    code = "for i in $(seq 150); do /bin/true; done"
    shells = [subprocess.Popen(["bash", "-c", code]) for _ in range(2)]
    while any(shell.poll() is None for shell in shells):
        found = platform.scan()
        assert os.getpid() in found
        for pid in found:
            platform.environ_of(pid), platform.command_of(pid), platform.catches(pid, 1)


@linux
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOMEM])
def test_a_process_that_cannot_be_read_is_not_dead(monkeypatch, child, number):
    start = platform.process_info(child.pid).start
    failing(monkeypatch, f"/{child.pid}/stat", number)
    for call in (platform.scan, lambda: platform.alive(child.pid, start), lambda: platform.send(child.pid, start, 9)):
        with pytest.raises(OSError):
            call()
    assert child.poll() is None, "nobody knows whether it is the same process"


@linux
def test_a_process_that_can_be_read_only_later_is_killed_then(monkeypatch, child):
    read, until = platform.read_bytes, time.monotonic() + 0.5

    def broken(path):
        if time.monotonic() < until:
            raise error(errno.EMFILE)
        return read(path)

    members = {child.pid: platform.process_info(child.pid)}
    monkeypatch.setattr(platform, "read_bytes", broken)
    result = tree.kill(tree.Tree("", members=members), grace_s=30, kill_wait_s=60)
    assert result.survivors == ()
    assert child.wait(60) == -signal.SIGTERM, "it is sent as soon as it can be"


def process_with_number(pid: int) -> subprocess.Popen | None:
    """A new process that gets this free number; None where the system does not let us choose."""
    for _ in range(50):
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError:
            return None
        made = subprocess.Popen(["sleep", "60"])
        if made.pid == pid:
            return made
        made.kill()
        made.wait()
    return None


@linux
def test_a_process_number_that_is_used_again_is_never_hit(monkeypatch, child):
    """The process dies after it was found alive and before the signal is sent, and another one gets its number."""
    start, alive, others = platform.process_info(child.pid).start, platform.alive, []

    def dies_after(pid, started):
        found = alive(pid, started)
        child.kill()
        child.wait()
        others.append(process_with_number(pid))
        return found

    monkeypatch.setattr(platform, "alive", dies_after)
    sent = platform.send(child.pid, start, signal.SIGKILL)
    if (other := others[0]) is None:
        pytest.skip("only root can choose the number of a process")
    time.sleep(0.2)
    unharmed = other.poll() is None
    other.kill()
    other.wait()
    assert not sent and unharmed


@linux
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EMFILE, errno.EPERM])
def test_a_signal_is_sent_where_there_is_no_pidfd(monkeypatch, child, number):
    def refuse(pid):
        raise error(number)

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert platform.send(child.pid, platform.process_info(child.pid).start, signal.SIGKILL)
    assert child.wait(30) == -signal.SIGKILL


@linux
def test_an_exit_code_that_somebody_waits_for_survives_the_reaping_of_orphans():
    """In a process of its own, which adopts orphans as the monitor does."""
    code = """
import subprocess, sys, time
from monitor.process import platform
platform.become_subreaper()
known = platform.popen(["sh", "-c", "exit 7"])
subprocess.run(["sh", "-c", "for i in 1 2 3 4 5; do sleep 0.2 & done"])
until = time.monotonic() + 60
while len(platform._children) or len([p for p in platform.scan().values() if p.ppid == platform.os.getpid()]):
    assert time.monotonic() < until, platform.scan()
    time.sleep(0.1)
    platform.reap()
print(known.wait())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "7\n", done.stderr


@linux
def test_an_environment_that_cannot_be_read_is_not_an_empty_one(monkeypatch, child):
    path = f"/{child.pid}/environ"
    for number in (errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM):
        with monkeypatch.context() as context:
            failing(context, path, number)
            assert platform.environ_of(child.pid) == b""
    failing(monkeypatch, path, errno.EIO)
    with pytest.raises(OSError):
        platform.environ_of(child.pid)
    with pytest.raises(OSError):
        tree.with_environment(tree.RUN, "/nowhere")
    with pytest.raises(OSError):
        tree.orphans()


@linux
def test_a_token_that_could_not_be_read_is_read_at_the_next_refresh(monkeypatch):
    env = {**os.environ, tree.TOKEN: MARK + "2"}
    process = subprocess.Popen(["sleep", "60"], env=env)
    found = tree.Tree(MARK + "2")
    with monkeypatch.context() as context:
        failing(context, "/environ", errno.EMFILE)
        assert found.refresh() == {}
    assert list(found.refresh()) == [process.pid]
    tree.kill(found, 5, 5)
    process.wait()


@linux
def test_which_signals_a_process_catches(child):
    code = "import signal, time; signal.signal(signal.SIGUSR2, print); print(1, flush=True); time.sleep(60)"
    handler = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    handler.stdout.readline()
    assert platform.catches(handler.pid, signal.SIGUSR2) and not platform.catches(handler.pid, signal.SIGUSR1)
    assert not platform.catches(child.pid, signal.SIGUSR2), "SIGUSR2 would kill it"
    handler.kill()
    handler.communicate()
    assert not platform.catches(handler.pid, signal.SIGUSR2), "gone"


@linux
def test_processes_are_found_by_the_token_they_inherited_and_killed():
    env = {**os.environ, tree.TOKEN: MARK + "1"}
    shell = subprocess.Popen(["bash", "-c", "trap '' TERM; sleep 61 & wait; wait"], env=env, start_new_session=True)
    found = tree.Tree(MARK + "1", (shell.pid, platform.process_info(shell.pid).start))
    wait_for(lambda: len(found.refresh()) == 2)
    result = tree.kill(found, grace_s=0.3, kill_wait_s=60)
    assert {p.name for p in result.killed} == {"bash", "sleep"} and result.survivors == ()
    assert shell.wait(60) == -9, "parents are killed first"


@linux
def test_a_process_forked_while_its_parent_is_killed_does_not_escape(tmp_path, monkeypatch):
    env = {**os.environ, tree.TOKEN: MARK + "3"}
    escapee = tmp_path / "escapee"
    escapee.write_text(f"#!/bin/bash\ntrap '' TERM\ntouch {tmp_path}/escaped\nwhile :; do sleep 1; done\n")
    escapee.chmod(0o755)
    script = f"trap 'setsid {escapee} & exit' TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done"
    shell = subprocess.Popen(["bash", "-c", script], env=env, start_new_session=True)
    wait_for((tmp_path / "ready").exists)
    found = tree.Tree(MARK + "3", (shell.pid, platform.process_info(shell.pid).start))
    refresh, rounds = tree.Tree.refresh, iter((True, False))

    def refresh_after_the_fork(self):
        if not next(rounds, True):
            wait_for((tmp_path / "escaped").exists)
        return refresh(self)

    monkeypatch.setattr(tree.Tree, "refresh", refresh_after_the_fork)
    result = tree.kill(found, grace_s=0.2, kill_wait_s=60)
    shell.wait()
    assert result.survivors == () and not tree.with_environment(tree.TOKEN, MARK + "3")
    assert {"bash", "escapee"} <= {p.name for p in result.killed}


@linux
@pytest.mark.parametrize("number", [errno.EPERM, errno.ESRCH, errno.EIO])
def test_a_signal_that_fails_does_not_protect_the_other_processes(monkeypatch, number):
    env = {**os.environ, tree.TOKEN: MARK + "4"}
    children = [subprocess.Popen(["sleep", "60"], env=env) for _ in range(3)]
    send = platform.send

    def broken(pid, start, which):
        if pid == children[0].pid:
            raise error(number)
        return send(pid, start, which)

    monkeypatch.setattr(platform, "send", broken)
    result = tree.kill(tree.Tree(MARK + "4"), grace_s=0.2, kill_wait_s=0.5)
    assert [p.pid for p in result.survivors] == [children[0].pid] and len(result.killed) == 3
    children[0].kill()
    for process in children:
        process.wait(30)


@linux
def test_the_known_processes_are_killed_when_the_machine_cannot_be_listed(monkeypatch):
    env = {**os.environ, tree.TOKEN: MARK + "5"}
    children = [subprocess.Popen(["sleep", "60"], env=env) for _ in range(2)]
    found = tree.Tree(MARK + "5")
    wait_for(lambda: len(found.refresh()) == 2, what="both are found")

    def broken():
        raise error(errno.EMFILE)

    monkeypatch.setattr(platform, "scan", broken)
    result = tree.kill(found, grace_s=5, kill_wait_s=5)
    assert len(result.killed) == 2 and result.survivors == ()
    assert [process.wait(30) for process in children] == [-signal.SIGTERM] * 2


@linux
@pytest.mark.parametrize("early", [b"", b"HOME=/root\0"], ids=["in mid-exec", "before its exec"])
def test_a_process_that_was_seen_before_its_exec_was_over_is_found(monkeypatch, early):
    """Until exec is over, /proc shows the parent's environment under the parent's name, then for a moment none at all."""
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, tree.TOKEN: MARK + "8"})
    found, scan, environ = tree.Tree(MARK + "8"), platform.scan, platform.environ_of
    name = "sleep" if not early else "python"
    wait_for(lambda: tree.TOKEN.encode() in environ(process.pid), what="the environment of the new program")
    with monkeypatch.context() as patched:
        patched.setattr(platform, "environ_of", lambda pid: early if pid == process.pid else environ(pid))
        patched.setattr(
            platform, "scan", lambda: {p: replace(i, name=name) if p == process.pid else i for p, i in scan().items()}
        )
        assert process.pid not in found.refresh()
    assert process.pid in found.refresh()
    process.kill()
    process.wait(30)


@linux
def test_pids_named_for_it_are_killed_without_a_sigterm():
    env = {**os.environ, tree.TOKEN: MARK + "6"}
    process = subprocess.Popen(["sleep", "60"], env=env)
    root = (process.pid, platform.process_info(process.pid).start)
    tree.kill(tree.Tree(MARK + "6", root), 5, 5, at_once=[process.pid])
    assert process.wait(30) == -signal.SIGKILL


@linux
def test_orphans_are_named_with_what_to_do(tmp_path):
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, tree.RUN: str(tmp_path), tree.TOKEN: "0" * 32})
    (sentence,) = [s for s in tree.orphans() if str(tmp_path) in s]
    assert f"1 process of {tmp_path} (sleep {process.pid})" in sentence and f"monitor start {tmp_path}" in sentence
    lock = Lock(tmp_path / locks.LOCK)
    assert lock.acquire()
    assert not [s for s in tree.orphans() if str(tmp_path) in s], "it has a monitor"
    lock.release()
    assert tree.with_environment(tree.RUN, str(tmp_path))[0].pid == process.pid
    assert not tree.with_environment(tree.RUN, str(tmp_path) + "x")
    process.kill()
    process.wait()


@linux
def test_the_boot_id_does_not_depend_on_the_wall_clock(monkeypatch):
    """A name computed from the wall clock flips, and a healthy training would be killed as one of the boot before."""
    before = platform.boot_id()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert platform.boot_id() == before != ""
    monkeypatch.setattr(platform, "read_bytes", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    assert platform.boot_id() == "", "unknown off Linux"


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"hangproof-{os.getuid() if hasattr(os, 'getuid') else os.environ.get('USERNAME', 'user')}"


def test_the_private_folder_is_ours_alone(scratch):
    assert platform.private_base() == scratch and scratch.stat().st_mode & 0o777 == 0o700
    scratch.chmod(0o755)
    folder = platform.private_folder("a run")
    assert scratch.stat().st_mode & 0o777 == 0o700 and folder.parent == scratch
    platform.drop_private(folder)
    assert not folder.exists()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners of files")
def test_a_private_folder_that_somebody_else_made_is_refused(scratch, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    scratch.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=f"{scratch} is not a directory.*TMPDIR"):
        platform.private_folder("run")
    assert not list((tmp_path / "elsewhere").iterdir())
    scratch.unlink()
    scratch.mkdir()
    scratch.chmod(0o777)
    with pytest.raises(OSError, match=f"{scratch} is yours.*every user can write.*TMPDIR"):
        platform.private_folder("run")
    scratch.chmod(0o700)
    if os.getuid() == 0:
        os.chown(scratch, 12345, 12345)
        owner = 12345
    else:
        owner = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
        scratch.rename(scratch.with_name(f"hangproof-{owner + 1}"))
    with pytest.raises(OSError, match=f"belongs to user {owner}.*TMPDIR"):
        platform.private_folder("run")


@linux
def test_a_waker_sleeps_its_time_and_wakes_when_a_child_exits_or_a_signal_handler_says_so():
    waker = platform.Waker()
    began = time.monotonic()
    waker.sleep(0.2)
    assert time.monotonic() - began >= 0.19
    process = subprocess.Popen(["sleep", "0.2"])
    waker.sleep(60)
    assert time.monotonic() - began < 30
    process.wait()
    before = signal.signal(signal.SIGALRM, lambda *_: waker.wake())
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    waker.sleep(60)
    assert time.monotonic() - began < 45
    signal.signal(signal.SIGALRM, before)
    for _ in range(3):
        waker.wake()
    waker.sleep(60)
    began = time.monotonic()
    waker.sleep(0.2)
    assert time.monotonic() - began >= 0.19, "several wakes end one sleep"


def test_a_lock_goes_with_its_holder(tmp_path):
    path = tmp_path / "lock"
    code = f"from monitor.process.locks import Lock; from pathlib import Path; import time; assert Lock(Path({str(path)!r})).acquire(); print(1, flush=True); time.sleep(60)"
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


@linux
def test_a_lock_on_a_file_removed_meanwhile_is_taken_again_on_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "ticket"
    first, lock = [True], locks._lock

    def removed_before(handle, shared=False):
        if first.pop() if first else False:
            path.unlink()
        return lock(handle, shared)

    monkeypatch.setattr(locks, "_lock", removed_before)
    mine = Lock(path)
    assert mine.acquire() and path.exists() and is_held(path)
    assert not locks.remove_unheld(path), "only the lock file of a dead process is removed"
    mine.release()
    assert not is_held(path) and locks.remove_unheld(path) and not path.exists()


def test_a_lock_that_is_not_held_has_no_descriptor(tmp_path):
    with pytest.raises(RuntimeError, match="not held"):
        _ = Lock(tmp_path / "lock").handle


def test_none_of_it_imports_more_than_the_standard_library():
    modules = ["process.platform", "process.tree", "process.locks", "process.subjob", "gpu.nvml", "gpu.queue"]
    code = f"import sys, importlib\nfor m in {modules}: importlib.import_module('monitor.' + m)\nprint(*sorted(m for m in sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    allowed = set(sys.stdlib_module_names) | {"monitor", "guards", "sitecustomize", "__main__"}
    names = {name.partition(".")[0] for name in shown.split()}
    assert {n for n in names if n not in allowed and not n.startswith(("_", "distutils"))} == set()


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_it_imports_and_works_without_linux(system, tmp_path):
    """The modules of another system are missing, and psutil reads the processes."""
    code = f"""
import contextlib, os, pathlib, random, signal, subprocess, sys, tempfile, threading, psutil
tempfile.tempdir = {str(tmp_path)!r}
sys.platform = {system!r}
if sys.platform == "win32":
    sys.modules["fcntl"] = None
    for name in ("getuid", "sysconf", "killpg", "pidfd_open", "waitpid", "set_blocking"):
        delattr(os, name)
    del signal.SIGKILL, signal.SIGCONT
from monitor.process import locks, platform, subjob, tree
from monitor.gpu import nvml, queue
child = subprocess.Popen(["sleep", "60"], env={{**os.environ, tree.TOKEN: {MARK + "7"!r}}})
print(platform.alive(child.pid, platform.process_info(child.pid).start), platform.process_info(1 << 22))
print(len(tree.Tree({MARK + "7"!r}).refresh()), platform.command_of(child.pid), platform.catches(child.pid, 9))
platform.Waker().sleep(0.01)
platform.private_folder("x")
os.kill(child.pid, 9)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["True None", "1 sleep 60 True"]
