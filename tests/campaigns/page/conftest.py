"""Fixtures of the page's long journeys."""

import pytest
from ui_helpers import kill_runs


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data folder of its own, for this process too; what runs in it is killed at the end."""
    root = tmp_path / "data"
    monkeypatch.setenv("HANGPROOF_DATA", str(root))
    yield root
    (root / "outputs" / ".queue.json").unlink(missing_ok=True)
    kill_runs(root)
