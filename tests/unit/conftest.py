"""Fixtures of the tests that need files and this process alone."""

from runs_helpers import data

__all__ = ["data"]
