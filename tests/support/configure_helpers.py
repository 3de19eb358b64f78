"""A draft with settings and two images, and values of the form, for the tests of the tab New LoRA."""

from pathlib import Path

import pytest
from draft_helpers import drop, photo

from runs.machine import Machine
from ui.dataset import draft
from ui.new import form

DRAFT = "d" * 24
FORM = {"name": "cat", "trigger": "ohwx", "model": "tiny-flux", "backend": "diffusers", "tier": "16G", "resolution": 64}
FORM |= {"mixed_precision": "no", "max_train_steps": "12", "save_every_n_steps": "6", "sample_every_n_steps": "0"}
FORM |= {"workers": 0, "repeats": 1}
GPU = Machine("NVIDIA GeForce RTX 3060", 12.0, True, 220.0)
NO_GPU = Machine("", None, False, 220.0)


@pytest.fixture
def filled(data, tmp_path) -> str:
    """The id of a draft with settings and two images."""
    draft.save_fields(DRAFT, FORM)
    drop(DRAFT, photo(tmp_path / "a.png", 1), photo(tmp_path / "b.png", 2))
    return DRAFT


def edit(text):
    return text.replace("set -eu\n", "set -eu\n# mine\n", 1)


def exported() -> Path:
    """The ZIP of the draft, once its job has ended."""
    from ui import jobs
    from ui.new import export

    export.start(DRAFT)
    job, folder = jobs.wait(export.folder_of(DRAFT), export.JOB, 90), export.folder_of(DRAFT)
    assert job is not None and job.state == "done", jobs.output(folder, export.JOB)
    return Path(jobs.output(folder, export.JOB)[1]["file"])


def values(**given) -> dict:
    """The values of the form: a run on the tiny model."""
    return {**form.defaults(), "name": "my lora", "trigger": "tok", "model": "tiny-flux", **given}
