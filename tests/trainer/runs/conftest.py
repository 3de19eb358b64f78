"""Fixtures of the tests of runs."""

from ui_helpers import runs_data as data

__all__ = ["data"]
