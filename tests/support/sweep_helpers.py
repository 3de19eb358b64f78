"""A run with two images in a data root of its own, and sweeps that begin with it."""

import pytest
from runs_helpers import pictures

import runs
from jobs import queue
from runs import sweep

FIELDS = {"model": "tiny-flux", "backend": "diffusers", "tier": "16G", "resolution": 64, "workers": 0}
FIELDS |= {"trigger": "ohwx", "max_train_steps": 4, "sample_every_n_steps": 0, "save_every_n_steps": 2}


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A run with two images, in a data root of its own."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    monkeypatch.setenv("HANGPROOF_GPUS", "")
    folder = runs.create(runs.make({"name": "cat", **FIELDS}), pictures(tmp_path / "photos", 2))
    yield runs.load(folder)
    (tmp_path / "outputs" / queue.FILE).unlink(missing_ok=True)


def make(base, **values):
    return sweep.create(base.name, sweep.combinations(base, values), values, runs.datasets_dir() / base.slug)
