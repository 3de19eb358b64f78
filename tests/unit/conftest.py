"""Fixtures of the tests that need files and this process alone."""

from pathlib import Path

import pytest


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """An empty data root."""
    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.setenv("HANGPROOF_DATA", str(root))
    return root
