"""Fixtures of the tests with real processes."""

from pathlib import Path

import pytest
from ladder_runs import maker


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Makes a run with a toy trainer and runs its monitor to the end: f(fault, limits, **spec) -> (folder, exit code)."""
    return maker(tmp_path, monkeypatch)


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """An empty data root."""
    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.setenv("HANGPROOF_DATA", str(root))
    return root
