"""Fixtures of the tests of the queue."""

from queue_helpers import one_gpu
from sweep_helpers import base
