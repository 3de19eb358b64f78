"""The hang drill: what its events say; a real one is in tests/campaigns/test_short_runs.py."""

import subprocess
import sys

import runs
from launch import drill
from runs.paths import ROOT


def event(kind: str, mono_s: float, **more: float) -> dict:
    return {"kind": kind, "message": f"it {kind}", "mono_s": mono_s, **more}


def test_the_times_are_counted_from_the_freeze():
    started, first = event("started", 100.0), event("progress", 101.0)
    hang = event("hang", 112.5, since_s=2.5)  # the last progress was at 110.0
    after = [event("killed", 113.0), event("restarted", 114.0), event("progress", 122.0), event("progress", 200.0)]
    assert drill.times([started, first]) == {}
    assert drill.times([started, first, hang]) == {"hang": 2.5}
    assert drill.times([started, first, hang, *after]) == {
        "hang": 2.5,
        "killed": 3.0,
        "restarted": 4.0,
        "progress": 12.0,
    }


def test_only_a_demo_run_can_be_frozen(data):
    done = subprocess.run(
        [sys.executable, "-m", "launch", "drill", "my-run"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and runs.list_runs() == []
