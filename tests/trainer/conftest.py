"""What trainings of the built-in trainer start with: its tiny model, images, and a folder in memory."""

import shutil
import tempfile
from pathlib import Path

import pytest
from trainer_helpers import make_config, make_images


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


@pytest.fixture
def ring():
    """A folder for snapshots in memory."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="hangproof-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
