"""The hang drill is a run of its own; a real one is in tests/campaigns/test_short_runs.py."""

from runs_helpers import python

import runs


def test_only_a_demo_run_can_be_frozen(data):
    done = python("-m", "launch", "drill", "my-run")
    assert done.returncode == 2 and runs.list_runs() == []
