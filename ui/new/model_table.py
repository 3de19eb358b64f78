"""The table of all base models: what each needs with each VRAM choice, its trainer and its licence.

Made from the tables when it is opened, because it is larger than the rest of the form. On a narrow screen each row is a card.
"""

from collections.abc import Mapping
from typing import Any

import presets
from runs.machine import Machine
from ui.html import esc
from ui.new import form, model_note

INTRO = (
    "GPU memory that each model uses with its usual settings. Where the figure is smaller than the choice, the rest stays "
    "free. The notes above say where the figures of the chosen model come from."
)


def html(machine: Machine) -> str:
    """The table as HTML, with the choice that suits this machine's GPU marked."""
    tiers, own = presets.tiers(), own_tier(machine)
    heads = "".join(
        f'<th scope="col"{_mark(name == own)}>{esc(tier["label"])}{" (your GPU)" * (name == own)}</th>'
        for name, tier in tiers.items()
    )
    models, families = presets.models(), presets.families()
    groups: dict[str, list[str]] = {}
    for _, key in form.model_choices():
        rows = [_row(models[key], trainers, needs, own) for trainers, needs in by_trainer(key)]
        groups.setdefault(models[key]["family"], []).extend(rows)
    body = "".join(
        f'<tbody><tr class="hp-family"><th scope="rowgroup" colspan="{len(tiers) + 2}">{esc(families[family]["name"])}</th>'
        f"</tr>{''.join(rows)}</tbody>"
        for family, rows in groups.items()
    )
    head = f'<tr><th scope="col">Base model</th><th scope="col">Trainer</th>{heads}</tr>'
    return (
        f'<p class="hp-hint">{INTRO}</p><div class="hp-models" role="region" aria-label="Base models and the GPU memory they '
        f'use" tabindex="0"><table data-testid="models"><thead>{head}</thead>{body}</table></div>'
    )


def own_tier(machine: Machine) -> str:
    """The largest VRAM choice that this machine's GPU has the memory for; "" without a GPU, or with a smaller one."""
    held = [
        name for name, tier in presets.tiers().items() if machine.vram_gb and tier["vram_gb"] <= round(machine.vram_gb)
    ]
    return held[-1] if held else ""


def by_trainer(key: str) -> list[tuple[list[str], dict[str, dict[str, Any]]]]:
    """[(trainers, their tiers)] of a model. Trainers that need the same share an entry."""
    found: list[tuple[list[str], dict[str, dict[str, Any]]]] = []
    for backend in presets.backends_of(key):
        rows = presets.tiers_of(key, backend)
        same = [trainers for trainers, others in found if _needs(others) == _needs(rows)]
        if same:
            same[0].append(backend)
        else:
            found.append(([backend], rows))
    return found


def _needs(rows: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    return [row["needs_gb"] for row in rows.values()]


def _row(model: Mapping[str, Any], trainers: list[str], rows: Mapping[str, Mapping[str, Any]], own: str) -> str:
    smallest = next(row for row in rows.values() if not row["problem"])
    cells = []
    for name, row in rows.items():
        if row["problem"]:
            text = f'<span class="hp-unfit">too small: needs&nbsp;{smallest["vram_gb"]:g}&nbsp;GB</span>'
        else:
            text = f"{row['needs_gb']:g} GB"
        cells.append(f'<td{_mark(name == own)} data-label="{esc(row["label"])}">{text}</td>')
    about = f"{esc(model['note'] or 'Your own model, from models.toml.')} Licence: {model_note.licence(model)}."
    names = " or ".join(f"<span>{esc(form.BACKENDS[one])}</span>" for one in trainers)
    return (
        f'<tr><th scope="row">{esc(model["name"])}<span>{about}</span></th><td data-label="Trainer">{names}</td>'
        f"{''.join(cells)}</tr>"
    )


def _mark(own: bool) -> str:
    return ' class="hp-own-gpu"' * own
