"""*Try it in one minute*: a complete run on example photographs with the tiny model, on any machine.

It creates and starts a run of its own, so that the draft below the button stays as it is, with or without images.
"""

import tempfile
from pathlib import Path
from typing import Any

import runs
from ui.new import run_starts

LABEL = "Try it in one minute"
NAME = "first-try"
BUSY = '<p class="hp-intro" role="status">Preparing the example photos…</p>'
SAMPLES = "This run uses example photos and a toy model, so its samples are noise. Your own run works the same way."
INTRO = (
    '<p class="hp-intro"><strong>New here?</strong> Watch a complete run first. It trains Tiny Flux, a toy model, on example '
    'photos. It needs no GPU and no download, and changes nothing below. The <a href="?tab=doctor">hang drill</a> shows how a '
    "frozen run recovers.</p>"
)
# 8 photographs × 4 repeats × 10 epochs = 320 steps, with ten sample images; about 40 s on two CPU cores.
SETTINGS: dict[str, Any] = {
    "model": "tiny-flux",
    "backend": "diffusers",
    "tier": "16G",
    "repeats": 4,
    "epochs": 10,
    "save_every_n_epochs": 5,
    "sample_every_n_steps": None,
    "workers": 0,
}


def start() -> tuple[Path, list[str]]:
    """Create the example run and start it; returns as run_starts.start. Raises NotStarted, RunError, PresetError."""
    from runs.examples import TRIGGER, write_examples

    spec = runs.make(
        {"name": runs.free_name(NAME), "trigger": TRIGGER, "prompts": [f"{TRIGGER}, a shiny red ball"], **SETTINGS}
    )
    with tempfile.TemporaryDirectory() as photos:
        write_examples(Path(photos))
        folder = runs.create(spec, Path(photos))
    return run_starts.begin(folder, [SAMPLES])
