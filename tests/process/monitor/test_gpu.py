"""The GPU helper: a driver that fails or never answers costs the monitor neither time nor life. The driver is a fake."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from unittest.mock import Mock

import pytest
from monitor_helpers import ROOT, wait_for

from monitor import gpu
from monitor.process import platform

posix = pytest.mark.skipif(os.name == "nt", reason="signals")


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
        memory_used=1 << 30, memory_total=24 << 30, spill=os.name == "nt", name="Stand-in", uuid="GPU-0", utilization=50,
        power_w=250.5, limit_w=300.0, throttle="power limit, too hot", pids=[],
    )  # fmt: skip
    assert one.note == ""
    first = one._reading()["at_s"]
    one.read()
    wait_for(lambda: one._reading()["at_s"] > first)
    assert one._reading()["at_s"] < first + 9, "each read requests the next reading"


def test_the_list_of_gpus_is_waited_for(gpus, driver):
    (driver / "hangs").touch()
    one = gpus()
    assert one.listed() is None, "the driver has not answered yet"
    (driver / "hangs").unlink()
    assert [gpu["uuid"] for gpu in wait_for(one.listed)] == ["GPU-0"]


def test_without_a_gpu_there_is_no_helper(monkeypatch, tmp_path):
    monkeypatch.setenv("HANGPROOF_GPUS", "")
    monkeypatch.setattr(gpu, "DRIVER_FILES", (tmp_path / "none",))
    monkeypatch.setattr(gpu, "WINDOWS", False)
    one = gpu.Gpus()
    assert not gpu.present() and one._job is None and one.read() == () and one.note == ""
    assert one.wait_free({1}, 1) == set()
    one.close()
    monkeypatch.setattr(gpu, "DRIVER_FILES", (tmp_path,))
    assert gpu.present()


@pytest.mark.parametrize(
    "how, text", [("fails", "version mismatch"), ("lost", "GPU is lost"), ("import", "no NVML: x")]
)
def test_a_driver_that_fails_is_a_note(gpus, driver, how, text):
    if how == "import":
        (driver / "pynvml.py").write_text("raise ImportError('x')")
    (driver / how).touch()
    one = gpus()
    assert text in wait_for(lambda: one.note)
    assert one.read() == ()
    left, took_s = seconds(one.wait_free, {1}, 60)
    assert left == set() and took_s < 60


def test_waiting_for_the_memory_of_dead_processes_ends_when_it_is_free(gpus, driver):
    (driver / "pids").write_text("12 13")
    one = gpus()
    wait_for(one.read)
    assert one.wait_free({13, 14}, 0.5) == {13}
    assert one.wait_free({14}, 5) == set()
    subprocess.Popen(
        [sys.executable, "-c", f"import time; time.sleep(.5); open({str(driver / 'pids')!r}, 'w').close()"]
    )
    assert one.wait_free({12, 13}, 60) == set()


def test_a_driver_that_never_answers_is_a_note_and_is_not_waited_for(gpus, driver, monkeypatch):
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


@posix
def test_a_helper_that_does_not_read_does_not_block_the_monitor(gpus):
    """On Windows the helper never read its input; here it is stopped. 80,000 requests fill any pipe."""
    one = gpus()
    wait_for(one.read)
    os.kill(one._job._popen.pid, signal.SIGSTOP)
    for _ in range(80_000):
        one._request()
    one.close()


@posix
def test_the_helper_exits_with_the_monitor_even_when_the_driver_hangs(driver):
    (driver / "hangs").touch()
    code = "from monitor.gpu import Gpus; import time; g = Gpus(); print(g._job._popen.pid, flush=True); time.sleep(60)"
    monitor = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    helper = int(monitor.stdout.readline())
    time.sleep(0.2)  # it is in the driver by then
    monitor.kill()
    monitor.communicate()
    wait_for(lambda: (info := platform.process_info(helper)) is None or info.dead, timeout_s=60)


@posix
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
