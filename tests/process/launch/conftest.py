"""Fixtures of the tests of launch/."""

from short_run_helpers import one_cpu

__all__ = ["one_cpu"]
