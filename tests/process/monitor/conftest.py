"""Fixtures of the monitor's tests."""

import pytest
from monitor_evidence import make_loop, trained
from monitor_helpers import folder


@pytest.fixture
def child(spawn):
    """A process that does nothing."""
    return spawn()
