"""Fixtures of the tests with real processes."""

import pytest
from ladder_runs import maker
from runs_helpers import data

__all__ = ["data"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Makes a run with a toy trainer and runs its monitor to the end: f(fault, limits, **spec) -> (folder, exit code)."""
    return maker(tmp_path, monkeypatch)
