"""Fixtures of the tests of the tab New LoRA."""

from checkout_helpers import checkout
from configure_helpers import filled
from runs_helpers import data

__all__ = ["checkout", "data", "filled"]
