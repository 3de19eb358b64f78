"""The built-in trainer trains as many steps as the page shows; tests/upstream/test_steps.py has kohya's trainers."""

from types import SimpleNamespace

import pytest
from step_cases import cases, shown, written

from trainer import data_order, dataset, validation


def test_the_built_in_trainer_trains_as_many_steps_as_the_page_shows(data):
    compared = 0
    for spec, folders in cases("diffusers", (0.0, 0.1, 0.25, 0.5)):
        flags = {
            "resolution": 512,
            "train_batch_size": spec.batch_size,
            "enable_bucket": True,
            "caption_extension": ".txt",
        }
        flags |= {"min_bucket_reso": 256, "max_bucket_reso": 1024, "bucket_reso_steps": 64, "bucket_no_upscale": False}
        images = dataset.read(
            written(spec, folders), SimpleNamespace(**flags, caption_prefix=None, caption_suffix=None)
        )
        if len(images) == 1 and spec.validation_split:
            continue  # the trainer refuses to hold out its only image, and so does the form
        kept, _ = validation.split(images, spec.validation_split, 7)
        batches = len(data_order.EpochSampler(kept, 7, 0, spec.gpus))
        assert shown(spec, folders) == spec.epochs * -(-batches // spec.gradient_accumulation), (spec, folders)
        compared += 1
    assert compared > 100


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    return tmp_path
