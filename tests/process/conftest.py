"""Fixtures of the tests with real processes."""

from ladder_runs import run
from runs_helpers import data
from snapshot_helpers import ring

__all__ = ["data", "ring", "run"]
