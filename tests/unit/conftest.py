"""Fixtures of the tests that need files and this process alone."""

from runs_helpers import data
from sweep_helpers import base

__all__ = ["base", "data"]
