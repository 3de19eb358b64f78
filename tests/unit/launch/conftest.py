"""Fixtures of the tests of launch."""

import pytest

from launch import travel


@pytest.fixture
def clean(monkeypatch):
    """No settings of this machine."""
    for name in (*travel.STORE_SETTINGS, "HF_HOME", "SKYPILOT_VENV"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """A lease is taken within a moment."""
    (tmp_path / "limits.toml").write_text("allow_below_guards = true\n[store]\nlease_s = 1.5\n")
    monkeypatch.setenv("HANGPROOF_LIMITS", str(tmp_path / "limits.toml"))
