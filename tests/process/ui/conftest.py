"""What most tests of the page's modules start with: a draft in an empty data root, one with settings."""

from configure_helpers import filled
from draft_helpers import mine
