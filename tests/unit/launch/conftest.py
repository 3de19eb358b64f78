"""Fixtures of the tests of launch."""

from launch_helpers import clean, quick

__all__ = ["clean", "quick"]
