"""Faults that once lost a run: each test failed on the monitor before its fix.

The errors are put into the monitor's own process from outside (`inject`).
"""

import sys

import pytest
from monitor_helpers import ROOT, events, inject, supervise, toy_run
from run_facts import completed, status
from toys import AT, HANG, SHORT, fault_at

from guards import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc")]


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
