"""Fixtures of the tests with real processes."""

from ladder_runs import run
from runs_helpers import data

__all__ = ["data", "run"]
