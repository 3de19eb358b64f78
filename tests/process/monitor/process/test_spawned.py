"""Who belongs to a run and how it is killed; a child with a deadline, which never takes the monitor with it."""

import errno
import itertools
import os
import signal
import sys
import time
from unittest.mock import Mock

import children
import pytest
from monitor_helpers import ROOT, wait_for
from proc_helpers import error, failing, linux, start_of

from monitor.process import platform, spawned

MARK = f"test-{os.getpid()}"  # the token: another run of these tests has another one
OURS = {spawned.TOKEN: MARK}


@linux
def test_processes_are_found_by_the_token_they_inherited_and_killed(spawn):
    traps = "trap 'echo term' TERM; (trap '' TERM; exec sleep 61) & while :; do wait; done"
    shell, rank = (spawn("bash", "-c", traps, **OURS) for _ in range(2))
    found = spawned.Tree(MARK, (shell.pid, start_of(shell)))
    wait_for(lambda: sorted(p.name for p in found.refresh().values()) == ["bash", "bash", "sleep", "sleep"])
    result = spawned.kill(found, grace_s=0.3, kill_wait_s=60, at_once=[rank.pid])
    assert {p.name for p in result.killed} == {"bash", "sleep"} and result.survivors == ()
    assert shell.wait(60) == rank.wait(60) == -9, "parents are killed first"
    assert shell.stdout.read() == "term\n", "SIGTERM is sent once"
    assert rank.stdout.read() == "", "a rank gets none"


@linux
def test_a_process_forked_while_its_parent_is_killed_does_not_escape(tmp_path, monkeypatch, spawn):
    escapee = tmp_path / "escapee"
    escapee.write_text(f"#!/bin/bash\ntrap '' TERM\ntouch {tmp_path}/escaped\nwhile :; do sleep 1; done\n")
    escapee.chmod(0o755)
    script = f"trap 'setsid {escapee} & exit' TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done"
    shell = spawn("bash", "-c", script, **OURS)
    wait_for((tmp_path / "ready").exists)
    found = spawned.Tree(MARK, (shell.pid, start_of(shell)))
    refresh, rounds = spawned.Tree.refresh, iter((True, False))

    def refresh_after_the_fork(self):
        if not next(rounds, True):
            wait_for((tmp_path / "escaped").exists)
        return refresh(self)

    monkeypatch.setattr(spawned.Tree, "refresh", refresh_after_the_fork)
    result = spawned.kill(found, grace_s=0.2, kill_wait_s=60)
    assert result.survivors == () and not spawned.with_environment(spawned.TOKEN, MARK)
    assert {"bash", "escapee"} <= {p.name for p in result.killed}


@linux
@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO])
def test_a_signal_that_fails_does_not_protect_the_other_processes(monkeypatch, number, spawn):
    children = [spawn(**OURS) for _ in range(3)]
    send = platform.send

    def broken(pid, start, which):
        if pid == children[0].pid:
            raise error(number)
        return send(pid, start, which)

    monkeypatch.setattr(platform, "send", broken)
    result = spawned.kill(spawned.Tree(MARK), grace_s=0.2, kill_wait_s=0.2)
    assert [p.pid for p in result.survivors] == [children[0].pid] and len(result.killed) == 3


@linux
@pytest.mark.parametrize("what", ["every file, for a moment", "the list"])
def test_the_known_processes_are_killed_although_the_machine_cannot_be_read(monkeypatch, spawn, what):
    children, found = [spawn(**OURS) for _ in range(2)], spawned.Tree(MARK)
    assert len(found.refresh()) == 2
    if what == "the list":
        monkeypatch.setattr(platform, "scan", Mock(side_effect=error(errno.EMFILE)))
    else:
        failing(monkeypatch, "", errno.EMFILE, time.monotonic() + 0.5)
    result = spawned.kill(found, grace_s=30, kill_wait_s=60)
    assert len(result.killed) == 2 and result.survivors == ()
    assert [process.wait(60) for process in children] == [-signal.SIGTERM] * 2, "it is sent as soon as it can be"


@linux
@pytest.mark.parametrize("early", [error(errno.EMFILE), {}, {"HOME": "/root"}])
def test_a_token_that_cannot_be_read_yet_is_read_at_the_next_refresh(monkeypatch, early, spawn):
    """Until exec is over, /proc shows the parent's environment, then for a moment none at all."""
    process, found, environ = spawn(**OURS), spawned.Tree(MARK), platform.environ_of
    with monkeypatch.context() as patched:
        answer = Mock(side_effect=[early])
        patched.setattr(platform, "environ_of", lambda pid: answer() if pid == process.pid else environ(pid))
        assert found.refresh() == {}
    assert list(found.refresh()) == [process.pid]


@linux
def test_orphans_are_named_with_what_to_do(tmp_path, spawn, monkeypatch):
    process = spawn(**{spawned.RUN: str(tmp_path), spawned.TOKEN: "0" * 32})
    (sentence,) = [s for s in spawned.orphans() if str(tmp_path) in s]
    assert f"1 process of {tmp_path} (sleep {process.pid})" in sentence and f"monitor start {tmp_path}" in sentence
    lock = platform.Lock(tmp_path / platform.LOCK)
    assert lock.acquire()
    assert not [s for s in spawned.orphans() if str(tmp_path) in s], "it has a monitor"
    lock.release()
    spawn(**{spawned.RUN: str(tmp_path / "is gone"), spawned.TOKEN: "0" * 32})
    assert any(f"monitor stop '{tmp_path / 'is gone'}'" in s for s in spawned.orphans())
    with monkeypatch.context() as patched:
        patched.setattr(spawned.shell, "word", lambda path: f'"{path}"')  # as on Windows
        assert any(f'monitor stop "{tmp_path / "is gone"}"' in s for s in spawned.orphans())
    with monkeypatch.context() as patched:
        patched.setattr(platform, "namespace", lambda pid="self": str(pid))
        assert not [s for s in spawned.orphans() if "gone" in s], "a container's, whose folder has another path"
    assert spawned.with_environment(spawned.RUN, str(tmp_path))[0].pid == process.pid
    assert not spawned.with_environment(spawned.RUN, str(tmp_path) + "x")
    (tmp_path / "link").symlink_to(tmp_path)  # a data folder on another disk
    for folder in (tmp_path, tmp_path / "link"):
        with spawned.idle(folder) as free:
            assert not free, "its training lives"


def run(code, timeout_s=60, **more):
    """Run Python code to its end."""
    job = spawned.Subjob([sys.executable, "-c", code], timeout_s, **more)
    job.wait(time.sleep)
    return job


def test_the_answer_is_the_json_object_on_the_last_line_whatever_it_reads_and_however_much_it_prints():
    job = run("print('noise'); print('{\"a\": 1}'); print()")
    assert (job.code, job.error, job.answer()) == (0, "", {"a": 1}) and job.text().startswith("noise")
    assert not job.timed_out
    assert run("print('[1]')").answer() is None and run("print('{')").answer() is None and run("").answer() is None
    echo = "import sys; print(len(sys.stdin.read()))"
    assert run(echo, stdin=b"x" * 1_000_000).text().strip() == "1000000"
    assert run(echo).text().strip() == "0"
    job = run("import sys; sys.stderr.write('x' * 3_000_000); print('\\nend')")
    assert job.code == 0 and len(job.text()) <= 1 << 20 and job.text().endswith("end\n")


def test_the_error_is_the_last_line_or_the_exit_status():
    assert run("import sys; sys.exit('run.toml: no model')").error == "run.toml: no model"
    assert run("import sys; sys.exit(3)").error.endswith("failed: exit status 3")
    job = run("import sys; print('{\"a\": 1}'); sys.exit(3)")
    assert job.error.endswith("failed: exit status 3") and job.answer() == {"a": 1} and job.code == 3
    job = run("import os; print('half a line', flush=True); os.kill(os.getpid(), 11)")
    assert job.error.endswith("was killed by SIGSEGV") and job.code == -11 and job.text() == "half a line\n"


def test_its_deadline_or_a_pause_that_raises_kills_it_and_its_children():
    job = spawned.Subjob(["bash", "-c", "sleep 600 & echo $!; wait"], 0.5)
    job.wait(time.sleep)
    assert job.timed_out and "timed out after 0.5 s" in job.error and job.code == -9
    child = int(job.text())
    wait_for(lambda: (info := platform.process_info(child)) is None or info.dead)
    job.kill()
    assert "timed out" in job.error, "the first reason stays"
    job = spawned.Subjob([sys.executable, "-c", "import time; time.sleep(60)"], 60)
    with pytest.raises(KeyboardInterrupt):
        job.wait(Mock(side_effect=KeyboardInterrupt))
    assert job.done() and job.error.endswith("was killed") and job.code != 0


@pytest.mark.parametrize(
    ("moves", "limit_s", "standstill_s", "late"),
    [(True, 0.6, 0.3, "0.6 s"), (False, 600, 0.3, "0.3 s in which it read and wrote nothing")],
)
def test_a_standstill_or_its_limit_ends_one_that_moves_bytes(monkeypatch, moves, limit_s, standstill_s, late):
    """One that lasts: ../resume/test_checkpoints.py."""
    moved = itertools.count()
    monkeypatch.setattr(spawned, "moved_bytes", lambda pid: next(moved) if moves else 7)
    job = run("import time; time.sleep(60)", limit_s, standstill_s=standstill_s)
    assert job.timed_out and job.error.endswith(f"timed out after {late}")


def test_a_program_that_is_missing_is_an_error_in_words():
    job = spawned.Subjob(["no-such-program-here"], 5)
    assert job.done() and job.code is None and job.answer() is None and job.text() == ""
    assert job.error.startswith("no-such-program-here cannot be started: No such file or directory")
    job.wait(time.sleep)
    job.kill()
    assert spawned.Subjob(["a\0b"], 5).error


@linux
def test_a_full_tmp_costs_no_answer(monkeypatch):
    """Without the answer of its check, a good LoRA would be called damaged, and trained again until the run fails."""
    monkeypatch.setattr("tempfile.tempdir", "/dev/full")
    job = run("import sys; print(sys.stdin.read())", 60.0, stdin=b'{"usable": true}')
    assert job.answer() == {"usable": True}, job.error


@linux
def test_without_a_free_descriptor_it_is_done_at_once():
    code = """
import os, resource, tempfile
from monitor.process.spawned import Subjob
tempfile.gettempdir()
n = len(os.listdir('/proc/self/fd')) - 1
for free in range(6):
    resource.setrlimit(resource.RLIMIT_NOFILE, (n + free, 4096))
    job = Subjob(['true'], 5, stdin=b'text')
    while not job.done():
        pass
    print('fails' if 'Too many open files' in job.error else job.error or 'works')
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
assert len(os.listdir('/proc/self/fd')) - 1 == n, 'nothing stays open'
"""
    shown = children.run(code)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.split()[:4] == ["fails"] * 4 and set(shown.stdout.split()) == {"fails", "works"}


def test_a_child_that_cannot_be_killed_does_not_hold_us_up(monkeypatch):
    killed = []
    job = spawned.Subjob(["sleep", "60"], 0.2)
    with monkeypatch.context() as context:
        context.setattr(os, "killpg", lambda *_: killed.append(1))  # as if it were in uninterruptible sleep
        wait_for(job.done)
        assert job.done() and job.timed_out and job.code is None and len(killed) == 1, "the wait is paid once"
    assert f"process {job._popen.pid} is stuck in the kernel" in job.error
    os.kill(job._popen.pid, signal.SIGKILL)
    job._popen.wait()


def test_helpers_do_not_look_like_processes_of_a_run(monkeypatch):
    for name in ("HANGPROOF_TOKEN", "HANGPROOF_RUN", "HANGPROOF_HEARTBEAT"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("HANGPROOF_DATA", "y")
    shown = run("import os; print(sorted(k for k in os.environ if k.startswith('HANGPROOF_')))").text()
    assert "HANGPROOF_DATA" in shown and not any(n in shown for n in ("TOKEN", "HANGPROOF_RUN", "HEARTBEAT"))
    assert spawned.ROOT == ROOT


def test_the_python_of_a_virtual_environment_of_windows_is_the_child_of_what_was_started(monkeypatch, spawn):
    """Its python.exe is a launcher: a run, or its store, seemed not to start."""
    launcher = spawn("bash", "-c", "sleep 60 & echo $!; wait")
    pid = int(launcher.stdout.readline())
    assert spawned.is_python_of(launcher, launcher.pid) and not spawned.is_python_of(launcher, pid)
    monkeypatch.setattr(platform, "WINDOWS", True)
    assert spawned.is_python_of(launcher, launcher.pid) and spawned.is_python_of(launcher, pid)
    assert not any(spawned.is_python_of(launcher, other) for other in (os.getpid(), 1 << 22, None))


def test_on_windows_a_program_whose_dead_parent_had_a_number_of_ours_is_not_killed(monkeypatch):
    """The desktop's parent is gone since the login, and its number is used again."""
    rows = {4000: (9.0, 1, "cmd"), 4004: (9.0, 4000, "python")}
    rows |= {4008: (2.0, 4004, "explorer.exe"), 4012: (3.0, 4008, "x")}
    found = {pid: platform.ProcessInfo(pid, at, ppid, "R", name, 0.0, 0) for pid, (at, ppid, name) in rows.items()}
    monkeypatch.setattr(platform, "scan", lambda: found)
    monkeypatch.setattr(platform, "environ_of", lambda pid: {})
    assert [*spawned.Tree(MARK, (4000, 9.0)).refresh()] == [4000, 4004]
