"""Fixtures of the tests that download."""

from download_helpers import hub

__all__ = ["hub"]
