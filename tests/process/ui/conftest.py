"""What most tests of the page's modules start with: a draft in an empty data root; and a trainer's checkout."""

from checkout_helpers import checkout
from draft_helpers import mine

__all__ = ["checkout", "mine"]
