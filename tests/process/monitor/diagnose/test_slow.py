"""A slow run under the real monitor: it is reported, and goes on. tests/campaigns/test_slowdown.py changes one."""

import sys

import pytest
from monitor_helpers import events, finish, limits_file, monitor, toy_run, wait_for
from run_facts import status

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="the toy is a shell script")]
# Its loader is slow from step 80 on, until the test has seen that this is reported.
LOADER = """
def fault(step):
    load_s = 0.6 if 80 <= step < 140 and not (run / "seen").exists() else 0.0
    time.sleep(load_s)
    hb.waited(load_s)
"""


def test_a_real_run_reports_a_slow_loader_goes_on_and_reports_its_end(folder):
    toy_run(folder, LOADER, steps=200, pace=0.05, every=500)
    limits = limits_file(folder, "[slow]\nwindow_s = 2\n")
    process = monitor(folder, HANGPROOF_LIMITS=str(limits))
    shown = wait_for(lambda: status(folder).get("slow"), 60, "a slowdown in the status")
    (folder / "seen").touch()
    code, _, said_there = finish(process, 120)
    assert code == 0, said_there
    event = events(folder, "slowdown")[0]
    assert event["cause"] == shown["cause"] == "loader_slow" and "next batch" in event["message"], event
    (over,) = events(folder, "slowdown_over")
    assert over["lost_s"] > 3 and not events(folder, "restarted")
    assert status(folder)["slow"] is None
