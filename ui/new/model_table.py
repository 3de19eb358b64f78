"""The table of all base models: what each needs with each VRAM choice, its trainer and its licence.

Made from the tables when it is opened, because it is larger than the rest of the form.
"""

from collections.abc import Iterator
from typing import Any

import presets
from runs.machine import Machine
from ui.html import table
from ui.new import form

INTRO = (
    "GPU memory that each model uses with its usual settings. Where the figure is smaller than the choice, the rest stays "
    "free. The notes above say where the figures of the chosen model come from."
)


def html(machine: Machine) -> str:
    """The table as HTML; the head of the choice that suits this machine's GPU says so."""
    own = own_tier(machine)
    tiers = [f"{tier['label']}{' (your GPU)' * (name == own)}" for name, tier in presets.tiers().items()]
    rows = (row for _, key in form.model_choices() for row in rows_of(key))
    shown = table("Base models and the GPU memory they use", ["Base model", "Trainer", *tiers, "Licence"], rows)
    return f'<p class="hp-hint">{INTRO}</p><div data-testid="models">{shown}</div>'


def own_tier(machine: Machine) -> str:
    """The largest VRAM choice that this machine's GPU has the memory for; "" without a GPU, or with a smaller one."""
    held = [
        name for name, tier in presets.tiers().items() if machine.vram_gb and tier["vram_gb"] <= round(machine.vram_gb)
    ]
    return held[-1] if held else ""


def rows_of(key: str) -> Iterator[list[str]]:
    """The rows of a model. Trainers that need the same share one."""
    model, needs = presets.models()[key], dict[tuple[str, ...], list[str]]()
    for backend in presets.backends_of(key):
        cells = tuple(_needs(row) for row in presets.tiers_of(key, backend).values())
        needs.setdefault(cells, []).append(form.BACKENDS[backend])
    for cells, trainers in needs.items():
        yield [model["name"], " or ".join(trainers), *cells, model["licence"]]


def _needs(row: dict[str, Any]) -> str:
    return "too small" if row["problem"] else f"{row['needs_gb']:g} GB"
