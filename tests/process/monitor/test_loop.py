"""The loop that watches goes on after an error of its own, and ends a run whatever its folder refuses."""

import sys

import pytest
from monitor_helpers import events, inject, supervise, toy_run
from run_facts import completed, weight
from toys import HANG, SHORT, undisturbed

from monitor.process.platform import Lock

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc")]
NO_KERNEL_COUNTERS = """
import builtins, io
real_open = builtins.open
def missing(path, *args, **kwargs):
    if str(path).startswith(("/proc/vmstat", "/proc/diskstats", "/proc/meminfo", "/proc/pressure")):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return real_open(path, *args, **kwargs)
builtins.open = io.open = missing
"""
A_BUG = """
import importlib.abc, importlib.util
from monitor.detect import progress
real, calls = progress.Watch.observe, []
def observe(self, seen):
    calls.append(1)
    if len(calls) % 4 == 0 and len(calls) < 40:
        raise ZeroDivisionError("a bug that nobody expected")
    return real(self, seen)
progress.Watch.observe = observe
"""


def test_an_error_that_nobody_expected_is_logged_reported_once_and_the_loop_goes_on(folder):
    """And a kernel without counters, such as gVisor, costs evidence and not the monitor."""
    toy_run(folder, HANG, **SHORT)
    assert supervise(folder, **inject(folder, NO_KERNEL_COUNTERS + A_BUG))[0] == 0
    completed(folder, restarts=1)
    assert len(events(folder, "monitor_error")) == 1
    log = (folder / "monitor.log").read_text()
    assert "Traceback (most recent call last)" in log and "ZeroDivisionError: a bug that nobody expected" in log
    assert "the same error, 2 times" in log


def test_a_folder_that_takes_no_status_and_no_report_does_not_keep_a_run_from_its_end(folder):
    toy_run(folder, HANG, **SHORT)
    (folder / "incidents").write_text("no folder can be made of this name")
    (folder / "status.json").mkdir()
    code = "from monitor import loop\nloop.PERSIST_S = 1.0\n"
    code, _, err = supervise(folder, **inject(folder, code))
    assert code == 0 and "cannot write" in err
    assert weight(folder) == undisturbed(SHORT["steps"])
    found = [e["kind"] for e in events(folder) if e["kind"] in ("started", "hang", "restarted")]
    assert found == ["started", "hang", "restarted"], "a finished run is not started again"
    lock = Lock(folder / "monitor.lock")
    assert lock.acquire()
    lock.release()
