"""Fixtures of the page's long journeys."""

import pytest
from hub_repo_server import TOKEN, serving_hub
from ui_helpers import kill_runs


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data folder of its own, for this process too; what runs in it is killed at the end."""
    root = tmp_path / "data"
    monkeypatch.setenv("HANGPROOF_DATA", str(root))
    yield root
    (root / "outputs" / ".queue.json").unlink(missing_ok=True)
    kill_runs(root)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on loopback that this process and its children publish on."""
    with serving_hub() as running:
        for name, value in {"HF_ENDPOINT": running.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield running
