"""Fixtures of the tests with real processes."""

from launch_helpers import clean
from monitor_helpers import spawn
from runs_helpers import data
from short_run_helpers import one_cpu
from snapshot_helpers import ring
