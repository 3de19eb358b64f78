"""What most tests of the page's modules start with: a draft in an empty data root, or one with settings and images."""

from configure_helpers import filled
from draft_helpers import mine

__all__ = ["filled", "mine"]
