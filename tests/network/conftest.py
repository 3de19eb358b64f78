"""An empty data root, as most tests of the modules start with it."""

from runs_helpers import data

__all__ = ["data"]
