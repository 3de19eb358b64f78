"""The GPUs: a driver that fails or never answers (a fake) costs the monitor neither time nor life, and runs
that want the same GPU get it one at a time, by locks that go with their holders.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from monitor_helpers import ROOT, wait_for

from monitor import gpu, recovery
from monitor.gpu import GpuQueue
from monitor.process import platform


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A folder with a fake `pynvml`; files in it say how it behaves."""
    shutil.copy(ROOT / "tests/support/shims/nvml/pynvml.py", tmp_path / "pynvml.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HANGPROOF_GPUS", "0")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def gpus(driver):
    """Makes the monitor's side, closed in the end."""
    made = []
    yield lambda: made.append(gpu.Gpus()) or made[-1]
    for one in made:
        one.close()


def seconds(call, *arguments):
    """(what it returns, how long it took)."""
    began = time.monotonic()
    return call(*arguments), time.monotonic() - began


def test_a_reading_has_what_the_gpu_supports(gpus, tmp_path, monkeypatch):
    (tmp_path / "values").write_text('{"power_w": 250.5, "throttle": 100}')  # 0x4 | 0x20 | 0x40
    monkeypatch.setenv("FAULTS_NVML_VALUES", str(tmp_path / "values"))
    one = gpus()
    (reading,) = wait_for(one.read)
    assert reading == dict(
        memory_used=1 << 30, memory_total=24 << 30, spill=False, name="Stand-in", uuid="GPU-0", bus="0000:3b:00", utilization=50,
        power_w=250.5, limit_w=300.0, throttle="power limit, too hot", pids=[],
    )  # fmt: skip
    assert one.note == ""
    (tmp_path / "new").write_text('{"used_gib": null}')  # a GPU that shares the host's memory
    os.replace(tmp_path / "new", tmp_path / "values")
    wait_for(lambda: not {"memory_used", "memory_total"} & one.read()[0].keys())
    first = one._reading()["at_s"]
    one.read()
    wait_for(lambda: one._reading()["at_s"] > first)
    assert one._reading()["at_s"] < first + 9, "each read requests the next reading"


def test_without_a_gpu_there_is_no_helper(monkeypatch, tmp_path):
    monkeypatch.setenv("HANGPROOF_GPUS", "")
    monkeypatch.setattr(gpu, "DRIVER_FILES", (tmp_path / "none",))
    one = gpu.Gpus()
    assert not gpu.present() and one._job is None and one.read() == () and one.note == ""
    assert one.wait_free({1}, 1) == set()
    one.close()
    monkeypatch.setattr(gpu, "DRIVER_FILES", (tmp_path,))
    assert gpu.present()


@pytest.mark.parametrize("how, text", [("fails", "mismatch"), ("lost", "GPU is lost"), ("import", "ImportError: x")])
def test_a_driver_that_fails_is_a_note(gpus, driver, how, text):
    if how == "import":
        (driver / "pynvml.py").write_text("raise ImportError('x')")
    (driver / how).touch()
    one = gpus()
    assert text in wait_for(lambda: one.note)
    assert one.read() == ()
    left, took_s = seconds(one.wait_free, {1}, 60)
    assert left == set() and took_s < 60


@pytest.mark.skipif(platform.WINDOWS, reason="a script of the shell stands for PowerShell")
def test_windows_is_asked_for_the_memory_of_a_full_gpu_and_not_again_for_a_while(tmp_path, monkeypatch):
    counters = tmp_path / "powershell"
    counters.write_text("""#!/bin/sh\necho '{"DedicatedUsage":9,"SharedUsage":7}'\n""")
    counters.chmod(0o755)
    monkeypatch.setattr(gpu, "POWERSHELL", str(counters))
    shared = gpu.SharedMemory()
    assert shared.poll() is None and wait_for(shared.poll) == 7
    counters.unlink()
    assert shared.poll() == 7
    shared._next_s = 0.0
    assert shared.poll() == 7 and wait_for(lambda: shared.poll() is None), "it fails: what it said before is old"


def test_waiting_for_the_memory_of_dead_processes_ends_when_it_is_free(gpus, driver):
    (driver / "pids").write_text("12 13")
    one = gpus()
    wait_for(one.read)
    assert one.wait_free({13, 14}, 0.5) == {13}
    assert one.wait_free({14}, 5) == set()
    threading.Timer(0.5, (driver / "pids").write_text, [""]).start()
    assert one.wait_free({12, 13}, 60) == set()


def test_a_driver_that_never_answers_is_a_note_and_is_not_waited_for(gpus, driver, monkeypatch):
    (driver / "hangs").touch()
    one = gpus()
    assert one.listed() is None, "the driver has not answered yet"
    (driver / "hangs").unlink()
    assert [gpu["uuid"] for gpu in wait_for(one.listed)] == ["GPU-0"]
    (driver / "hangs").touch()
    monkeypatch.setattr(gpu, "FRESH_S", 0.3)
    monkeypatch.setattr(gpu, "COUNT_S", 0.5)
    for timeout_s in (0.0, 0.2):
        left, took_s = seconds(gpus().wait_free, {1}, timeout_s)
        assert left == set() and timeout_s - 0.01 <= took_s < timeout_s + 30
    one = gpus()
    assert "has not answered for" in wait_for(lambda: one.note)
    assert one.read() == ()
    assert wait_for(lambda: one.listed() == ())
    assert seconds(one.wait_free, {1}, 60)[1] < 50


def test_the_helper_exits_with_the_monitor_even_when_the_driver_hangs(driver):
    (driver / "hangs").touch()
    code = "from monitor.gpu import Gpus; import time; g = Gpus(); print(g._job._popen.pid, flush=True); time.sleep(60)"
    monitor = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    helper = int(monitor.stdout.readline())
    time.sleep(0.2)  # it is in the driver by then
    monitor.kill()
    monitor.communicate()
    wait_for(lambda: (info := platform.process_info(helper)) is None or info.dead, timeout_s=60)


def test_a_helper_that_was_killed_is_started_again(gpus, monkeypatch):
    one = gpus()
    wait_for(one.read)
    helper = one._job._popen.pid
    os.kill(helper, signal.SIGKILL)
    assert "SIGKILL" in wait_for(lambda: one.note)
    monkeypatch.setattr(gpu, "RESTART_S", 0.0)
    first = one._reading()["at_s"]
    wait_for(lambda: one.read() and one._reading()["at_s"] > first)
    assert one._job._popen.pid != helper and one.note == ""


@pytest.mark.parametrize("where", ["pipe", "folder", "fork"])
def test_a_helper_that_cannot_start_is_a_note(gpus, monkeypatch, where):
    broken = Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    with monkeypatch.context() as context:
        module, name = {"pipe": (os, "pipe"), "folder": (gpu, "private_folder"), "fork": (subprocess, "Popen")}[where]
        context.setattr(module, name, broken)
        one = gpus()
        assert "Too many open files" in one.note and one.read() == () and one.wait_free({1}, 1) == set()
    monkeypatch.setattr(gpu, "RESTART_S", 0.0)
    assert wait_for(one.read) and one.note == "", "it is started once that works"


@pytest.mark.parametrize(
    ("ours", "cuda", "present", "of_one", "of_two"),
    [
        (None, "2,3", True, ["2"], ["2", "3"]),
        (None, "-1", True, [], []),
        ("a", "-1", True, ["a"], ["a"]),
        (None, None, True, ["0"], ["0", "1"]),
        (None, None, False, [], []),
    ],
)
def test_the_gpus_of_a_run_come_from_the_environment_and_its_spec(monkeypatch, ours, cuda, present, of_one, of_two):
    for name, value in (("HANGPROOF_GPUS", ours), ("CUDA_VISIBLE_DEVICES", cuda)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu, "present", lambda: present)
    assert (gpu.devices({}), gpu.devices({"gpus": 2})) == (of_one, of_two)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert gpu.devices({}) == (of_one or ["MPS"] * (cuda is None)), "a Mac trains one run at a time"


@pytest.fixture
def queued(tmp_path, monkeypatch):
    """Makes queued runs of this process for the GPUs "0" and "1", whose locks are in a folder of the test's own."""
    monkeypatch.setenv("HANGPROOF_GPUS", "0,1")
    monkeypatch.setenv("HANGPROOF_LOCKS", str(tmp_path))
    made = []

    def make(name, listed=None):
        made.append(GpuQueue(name, {}, *([listed] if listed else [])))
        return made[-1]

    yield make
    for one in made:
        one.release()


def test_one_run_gets_all_of_its_gpus_and_gives_one_back_until_it_gets_all(queued, monkeypatch):
    first, second = queued("first"), queued("second")
    assert not first.held
    assert first.acquire() and not second.acquire()
    assert len(first.handles()) == 2 and second.handles() == ()
    assert second.message == "waiting for GPU 0: the run 'first' uses it"
    first.release()
    assert second.acquire() and second.message == ""
    second.release()
    monkeypatch.setenv("HANGPROOF_GPUS", "1")
    holder = queued("holder")
    assert holder.acquire() and not first.acquire() and first.message == "waiting for GPU 1: the run 'holder' uses it"
    monkeypatch.setenv("HANGPROOF_GPUS", "0")
    other = queued("other")
    assert other.acquire()
    other.release()
    holder.release()
    assert first.acquire()


@pytest.mark.parametrize("call", ["open", "fstat"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_queue_that_cannot_be_written_is_a_message_until_it_can(queued, monkeypatch, number, call):
    """Where only the name of the holder cannot be written, the run gets its GPUs without."""
    broken = Mock(side_effect=OSError(number, os.strerror(number)))
    with monkeypatch.context() as context:
        context.setattr(platform.os, call, broken)
        one = queued("one")
        assert not one.acquire() and not one.held
    assert one.message == f"waiting for GPU 0, 1: its lock is not usable: {os.strerror(number)}"
    assert one.acquire() and one.message == ""
    other = queued("other")
    assert not other.acquire()
    one.release()
    assert other.acquire()
    other.release()
    monkeypatch.setattr(platform.os, "write", broken)
    assert one.acquire()


def test_a_gpu_stays_with_a_training_that_outlives_its_monitor(queued, make_loop):
    waits, run = queued("waits"), make_loop("")
    (run.folder.folder / "train.sh").write_text("sleep 60")
    wait_for(run.queue.acquire)
    attempt = recovery.start_attempt(run)
    run.queue.release()  # as the end of the monitor does
    try:
        assert not waits.acquire() and waits.message == "waiting for GPU 0: the run 'toy' uses it"
    finally:
        attempt.kill(0.0, 60.0)
    assert waits.acquire()
    attempt.close()


A, B, C = "GPU-aaaa1111-0", "GPU-bbbb2222-0", "GPU-bbbb3333-0"
LISTED = ({"uuid": A}, {"uuid": B}, {"uuid": C})


@pytest.mark.parametrize(
    ("named", "locked", "used"),
    [
        ("0", {A: "0"}, [A]),
        (A, {A: A}, [A]),
        ("GPU-aaaa", {A: "GPU-aaaa"}, [A]),
        (f"0,{A}", {A: "0"}, [A]),  # one GPU, named twice
        (f"0,{B}", {A: "0", B: B}, [A, B]),
        ("MIG-2", {"MIG-2": "MIG-2"}, [A, B, C]),  # a part of a divided GPU
        ("GPU-bbbb", {"GPU-bbbb": "GPU-bbbb"}, [B, C]),  # of two GPUs
        ("7", {"7": "7"}, []),
        ("test", {"test": "test"}, [A, B, C]),
    ],
)
def test_a_gpu_has_one_lock_however_it_is_named_and_its_readings_are_the_runs_own(named, locked, used):
    assert [one["uuid"] for one in gpu.own(LISTED, named.split(","))] == used
    assert gpu.lock_names(named.split(","), LISTED) == locked
    assert gpu.lock_names(named.split(","), ()) == {name: name for name in named.split(",")}, "without NVML"


def test_a_run_waits_until_its_gpus_are_listed_and_an_index_and_its_uuid_exclude_each_other(queued, monkeypatch):
    answers = [None, LISTED]
    one = queued("one", listed=lambda: answers.pop(0))
    assert not one.acquire() and one.message == "waiting for GPU 0, 1: the driver has not listed its GPUs yet"
    assert one.acquire()
    monkeypatch.setenv("HANGPROOF_GPUS", "GPU-aaaa")
    other = queued("other", listed=lambda: LISTED)
    assert not other.acquire() and other.message == "waiting for GPU GPU-aaaa: the run 'one' uses it"
    one.release()
    assert other.acquire()


def test_the_folder_of_the_locks_is_the_same_for_every_account(monkeypatch, tmp_path):
    monkeypatch.delenv("HANGPROOF_LOCKS")
    found = gpu.shared_folder()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert gpu.shared_folder() == found != tmp_path


OTHER_ACCOUNT = """
import os, sys, time
from monitor.gpu import GpuQueue
os.umask(0o077)
os.setgid(65534); os.setuid(65534)
queue = GpuQueue(sys.argv[1], {})
print(queue.acquire(), queue.message, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another account")
def test_two_accounts_exclude_each_other_in_a_folder_that_everybody_may_write_to(queued, spawn, request, monkeypatch):
    # Not below tmp_path: another pytest that starts closes that to other accounts again.
    shared = Path(tempfile.mkdtemp(prefix="hangproof-test-"))
    request.addfinalizer(lambda: shutil.rmtree(shared))
    shared.chmod(0o1777)
    monkeypatch.setenv("HANGPROOF_LOCKS", str(shared))

    theirs = spawn(sys.executable, "-c", OTHER_ACCOUNT, "theirs")
    assert theirs.stdout.readline() == "True \n"
    mine = queued("mine")
    assert not mine.acquire() and mine.message == "waiting for GPU 0: the run 'theirs' uses it"
    theirs.kill()
    theirs.wait()
    assert mine.acquire(), mine.message
    theirs = spawn(sys.executable, "-c", OTHER_ACCOUNT, "theirs")
    assert theirs.stdout.readline() == "False waiting for GPU 0: the run 'mine' uses it\n"
    mine.release()
    assert mine.acquire()


def test_a_link_where_a_lock_should_be_is_refused_and_what_it_leads_to_is_unharmed(queued, tmp_path):
    (tmp_path / "mine").write_text("precious")
    path = tmp_path / "hangproof-gpu.0.lock"
    for link in (path.symlink_to, path.hardlink_to):
        link(tmp_path / "mine")
        one = queued("one")
        assert not one.acquire() and "its lock is not usable" in one.message and str(path) in one.message
        one.release()
        path.unlink()
    assert (tmp_path / "mine").read_text() == "precious"
