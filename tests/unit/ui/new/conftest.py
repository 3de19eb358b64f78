"""Fixtures of the tests of the tab New LoRA."""

from configure_helpers import filled

__all__ = ["filled"]
