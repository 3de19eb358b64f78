"""Fixtures of the tests that need files and this process alone."""

from checkout_helpers import checkout
from launch_helpers import clean, quick
from monitor_helpers import spawn
from runs_helpers import data
from sweep_helpers import base
