"""Fixtures of the monitor's tests."""

import pytest
from monitor_helpers import clean_up


@pytest.fixture
def folder(tmp_path):
    """Where a toy run is made; nothing of it is alive afterwards."""
    yield tmp_path / "toy"
    clean_up(tmp_path / "toy")
