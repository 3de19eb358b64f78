"""The hang drill: what its events say; a real one is in tests/campaigns/test_short_runs.py."""

from runs_helpers import python

import runs
from launch import drill


def event(kind: str, mono_s: float, **more: float) -> dict:
    return {"kind": kind, "message": f"it {kind}", "mono_s": mono_s, **more}


def test_the_times_are_counted_from_the_freeze():
    started, first = event("started", 100.0), event("progress", 101.0)
    hang = event("hang", 112.5, since_s=2.5)  # the last progress was at 110.0
    after = [event("killed", 113.0), event("restarted", 114.0), event("progress", 122.0), event("progress", 200.0)]
    assert drill.times([started, first]) == {}
    assert drill.times([started, first, hang]) == {"hang": 2.5}
    found = drill.times([started, first, hang, *after])
    assert found == {"hang": 2.5, "killed": 3.0, "restarted": 4.0, "progress": 12.0}


def test_only_a_demo_run_can_be_frozen(data):
    done = python("-m", "launch", "drill", "my-run")
    assert done.returncode == 2 and runs.list_runs() == []
