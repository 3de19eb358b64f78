"""Fixtures of the page's tests."""

from checkout_helpers import checkout

__all__ = ["checkout"]
