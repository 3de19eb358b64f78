"""Fixtures of the tests of the queue."""

from queue_helpers import one_gpu
