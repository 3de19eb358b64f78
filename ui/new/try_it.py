"""*Try it in one minute*: a complete run on example photographs with the tiny model, on any machine.

It creates and starts a run of its own, so that the draft below the button stays as it is, with or without images.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import presets
import runs
from ui.html import esc
from ui.run import control

LABEL = "Try it in one minute"
NAME = "first-try"
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


def create() -> Path:
    """Create the example run; returns its folder. Raises RunError, PresetError."""
    from runs.examples import TRIGGER, write_examples

    spec = runs.make(
        {"name": runs.free_name(NAME), "trigger": TRIGGER, "prompts": [f"{TRIGGER}, a shiny red ball"], **SETTINGS}
    )
    with tempfile.TemporaryDirectory() as photos:
        write_examples(Path(photos))
        return runs.create(spec, Path(photos))


def start() -> Iterator[tuple[str, str, list[str]]]:
    """Create and start the example run; yields (text beside the button, folder name of the run or "", messages for its page)."""
    yield '<p class="hp-intro" role="status">Preparing the example photos…</p>', "", []
    try:
        folder = create()
    except (runs.RunError, presets.PresetError) as error:
        yield f'{INTRO}<p class="hp-hint hp-warn" role="alert">Not started: {esc(error)}</p>', "", []
        return
    try:
        control.start(folder)
    except runs.RunError as error:
        yield INTRO, folder.name, [f"The run was created but did not start: {error}"]
        return
    yield (
        INTRO,
        folder.name,
        ["This run uses example photos and a toy model, so its samples are noise. Your own run works the same way."],
    )
