"""Shared by the tests of the form: its values, machines, and every model with each of its trainers."""

from runs_helpers import picture

import presets
from runs.machine import Machine
from ui.dataset import draft
from ui.new import form

GPU = Machine("NVIDIA GeForce RTX 3060", 12.0, True, 31.2, 220.0)
NO_GPU = Machine("", None, False, 31.2, 220.0)
PAIRS = [(key, backend) for key in presets.models() for backend in presets.backends_of(key)]


def drop(draft_id: str, folder, count: int) -> None:
    """Add images to a draft."""
    paths = [picture(draft.uploads_dir() / f"up{n}" / f"{n}.png", size=(96, 64 + 32 * n)) for n in range(count)]
    assert draft.add(draft_id, [(path, path.name) for path in paths])[0] == count


def values(**given) -> dict:
    """The values of the form: a run on the tiny model."""
    return {**form.defaults(), "name": "my lora", "trigger": "tok", "model": "tiny-flux", **given}
