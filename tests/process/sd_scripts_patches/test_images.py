"""Images that cannot be read: which are replaced, and which end the run."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from unittest.mock import Mock

import patches_helpers as helpers
import pytest

from guards import npz
from sd_scripts_patches import images


def images_module(monkeypatch, load, batches=6):
    """What the images patch uses of sd-scripts: a group of one data set of `batches`, each of one image."""
    monkeypatch.setattr(images, "_unreadable", set())
    module = ModuleType("library.train_util")

    class BaseDataset:
        caching_mode = None

        def get_image_size(self, path):
            return load(path, False)

    class DatasetGroup:
        def __init__(self):
            self.datasets = [BaseDataset()]

        def __len__(self):
            return batches

        def __getitem__(self, index):
            return module.load_image(f"{index}.png", False)

    module.load_image, module.BaseDataset, module.DatasetGroup = load, BaseDataset, DatasetGroup
    helpers.apply(images.PATCH, module)
    return module, DatasetGroup()


def test_the_replacement_of_a_batch_depends_on_the_index_alone(monkeypatch, capsys):
    def load(path, alpha):
        if path in ("2.png", "3.png", "5.png"):
            raise SyntaxError("broken PNG file")
        return path

    _, data = images_module(monkeypatch, load)
    for _ in range(2):
        assert [data[i] for i in (5, 2, 3, 0, 2)] == ["0.png", "4.png", "4.png", "0.png", "4.png"]
    log = capsys.readouterr().err
    assert "batch 2 is replaced by the next one" in log and "(3 of at most 10 unreadable images)" in log
    assert "image 2.png cannot be read (SyntaxError: broken PNG file)" in log


def test_too_many_unreadable_images_end_the_run_with_a_name(monkeypatch):
    _, data = images_module(monkeypatch, Mock(side_effect=FileNotFoundError(2, "No such file or directory")))
    monkeypatch.setenv("HANGPROOF_SKIP_IMAGES", "3")
    with pytest.raises(OSError, match=r"image 3\.png cannot be read \(FileNotFoundError") as caught:
        data[0]
    assert type(caught.value) is OSError  # a parent process can unpickle it
    monkeypatch.setenv("HANGPROOF_SKIP_IMAGES", "0")
    with pytest.raises(OSError, match=r"image 0\.png cannot be read"):
        data[0]
    monkeypatch.setenv("HANGPROOF_SKIP_IMAGES", "9")
    data.datasets[0].caching_mode = "latents"  # then there is no batch to use instead
    with pytest.raises(OSError, match=r"image 0\.png cannot be read"):
        data[0]


def test_what_a_restart_can_repair_is_not_replaced(monkeypatch):
    """A disk that does not answer, and a damaged cache, which is encoded anew."""
    monkeypatch.setenv("HANGPROOF_IMAGE_TIMEOUT_S", "0.3")
    module, data = images_module(monkeypatch, lambda path, alpha=False: time.sleep(3600))
    with pytest.raises(TimeoutError, match=r"waited 0\.3 s for image 1\.png"):
        data[1]
    with ThreadPoolExecutor(1) as pool, pytest.raises(TimeoutError, match=r"waited 0\.3 s for image 9\.png"):
        pool.submit(module.load_image, "9.png").result()  # as while caching: no alarm reaches a pool's thread
    with pytest.raises(TimeoutError, match=r"waited 0\.3 s for the size of image 9\.png"):
        data.datasets[0].get_image_size("9.png")
    _, data = images_module(monkeypatch, lambda path, alpha: path)
    monkeypatch.setattr(type(data), "__getitem__", images._replace_unreadable(lambda self, i: npz.load("damaged.npz")))
    monkeypatch.setattr(npz, "load", lambda path: (_ for _ in ()).throw(ValueError(f"{path} is damaged")))
    with pytest.raises(ValueError, match=r"damaged\.npz is damaged"):
        data[1]
