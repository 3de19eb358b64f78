"""What most tests of the page's modules start with: an empty data root, and a draft in it; and a trainer's checkout."""

from checkout_helpers import checkout
from draft_helpers import mine
from runs_helpers import data

__all__ = ["checkout", "data", "mine"]
