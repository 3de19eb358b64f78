"""Fixtures of the monitor's tests."""

from monitor_helpers import folder

__all__ = ["folder"]
