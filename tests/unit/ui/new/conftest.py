"""Fixtures of the tests of the tab New LoRA."""

from configure_helpers import filled
from runs_helpers import data

__all__ = ["data", "filled"]
