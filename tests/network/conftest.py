"""An empty data root, as most tests of the modules start with it; what the tests of launch start with; a model hub."""

from download_helpers import hub
from launch_helpers import clean, quick
from runs_helpers import data
