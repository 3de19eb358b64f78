"""What most tests of the page's modules start with: an empty data root, and a draft in it."""

from draft_helpers import mine
from runs_helpers import data

__all__ = ["data", "mine"]
