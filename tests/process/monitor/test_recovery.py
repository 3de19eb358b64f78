"""Faults that once lost a run: each test failed on the monitor before its fix.

The errors are put into the monitor's own process from outside (`inject`).
"""

import sys

import pytest
from monitor_helpers import ROOT, events, inject, supervise, toy_run
from run_facts import completed, status, trainers, weight
from toys import AT, HANG, SHORT, fault_at, undisturbed

from guards import checkpoint
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


NO_EVENT_AT_A_START = """
from monitor import run_folder
real, failed = run_folder.RunFolder.event, []
def event(self, kind, message, **more):
    if kind in ("started", "restarted") and failed.count(kind) < 3:
        failed.append(kind)
        raise OSError(28, "No space left on device")
    return real(self, kind, message, **more)
run_folder.RunFolder.event = event
"""


def test_an_error_right_after_a_start_does_not_end_the_attempt_that_was_started(folder):
    toy_run(folder, HANG, **SHORT)
    assert supervise(folder, **inject(folder, NO_EVENT_AT_A_START))[0] == 0
    completed(folder, restarts=1)
    assert (folder / "training.log").read_text().count("=== ") == 2, "one attempt before the hang and one after it"
    assert len(events(folder, "killed")) == len(events(folder, "started")) == len(events(folder, "restarted")) == 1


@pytest.mark.parametrize("hangs", [True, False])
def test_a_monitor_that_fails_at_every_turn_stops_a_hung_run_with_the_reason_and_leaves_a_healthy_one(folder, hangs):
    toy_run(folder, HANG if hangs else "", steps=100, pace=0.03, every=10)
    bug = A_BUG.replace("len(calls) % 4 == 0 and len(calls) < 40", "len(calls) > 4")
    assert supervise(folder, "[watch]\nfault_s = 2\n", **inject(folder, bug))[0] == (1 if hangs else 0)
    now = status(folder)
    if hangs:
        assert now["state"] == "failed" and "a bug that nobody expected" in now["reason"]
        assert checkpoint.newest_valid(folder).name == "toy-step00000030-state"
        assert trainers(folder) == []
    else:
        completed(folder, steps=100)


def test_a_second_stage_that_fails_is_not_called_completed(folder):
    toy_run(folder, **SHORT)
    caches = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom guards.heartbeat import Heartbeat\n"
    (folder / "cache.py").write_text(caches + "Heartbeat.from_env().end('done')\n")
    (folder / "train.sh").write_text(f"cd {folder}\n{sys.executable} cache.py && exit 7\n")
    assert supervise(folder, limits="[restart]\nbackoff_first_s = 0.1\n")[0] == 4
    assert status(folder)["state"] == "failed"


# ---- checkpoints that cannot be judged ----


def test_a_run_whose_checkpoints_cannot_be_verified_stops_with_the_reason_and_not_at_step_0(folder):
    toy_run(folder, fault_at(AT, "os.kill(os.getpid(), 9)"), **SHORT)
    verifies = "'guards.checkpoint' in sys.orig_argv and 'verify' in sys.orig_argv"
    limits = "[restart]\nbackoff_first_s = 0.2\nstart_s = 2\n"
    assert supervise(folder, limits, **inject(folder, "os._exit(9)", verifies))[0] == 1
    now = status(folder)
    assert now["state"] == "failed" and "cannot be verified" in now["reason"] and now["attempt"] == 1
    assert checkpoint.newest_valid(folder).name == "toy-step00000030-state", "kept where it was"
    assert not list(folder.glob("*.bad")), "not called bad"


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
