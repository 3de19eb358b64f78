"""Fixtures of the tests of launch/."""

import pytest


@pytest.fixture
def one_cpu(monkeypatch):
    """No GPU, and one thread: a tiny model is slower with several."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
