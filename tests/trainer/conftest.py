"""What trainings of the built-in trainer start with: its tiny model, images, a folder in memory, and a data root."""

from configure_helpers import filled
from snapshot_helpers import ring
from ui_helpers import runs_data as data
from world_trainings import model, work
