"""What most tests of the page's modules start with: a draft in an empty data root."""

from draft_helpers import mine

__all__ = ["mine"]
