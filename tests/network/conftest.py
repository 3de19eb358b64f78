"""An empty data root, as most tests of the modules start with it; and what the tests of launch start with."""

from launch_helpers import clean, quick
from runs_helpers import data

__all__ = ["clean", "data", "quick"]
