"""What trainings of the built-in trainer start with: its tiny model, images, and a folder in memory."""

from pathlib import Path

import pytest
from snapshot_helpers import ring
from trainer_helpers import make_config, make_images

__all__ = ["ring"]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The tiny FLUX; it is not changed."""
    from trainer import tiny_flux

    return tiny_flux.ensure(tmp_path_factory.mktemp("models") / "tiny-flux")


@pytest.fixture(scope="module")
def work(model, tmp_path_factory):
    """A folder for the runs of a file, with five images."""
    folder = tmp_path_factory.mktemp("runs")
    images = make_images(folder / "images")
    config = make_config(folder / "dataset.toml", images)
    return {"folder": folder, "model": model, "images": images, "config": config}
