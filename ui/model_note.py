"""Notes on the chosen model and this machine: what the model is for, the GPU found, and the next step to use the model."""

from collections.abc import Mapping
from typing import Any

import presets
import runs
from runs import weights
from runs.machine import Machine, this_machine
from ui import hub_login
from ui.html import esc


def choices_html() -> str:
    """A line of help for each base model."""
    lines = "".join(
        f"<li><strong>{esc(model['name'])}</strong>: {esc(model['note'] or 'Your own model, from models.toml.')}</li>"
        for model in presets.models().values()
    )
    return f'<details class="hp-choices"><summary>Which base model?</summary><ul>{lines}</ul></details>'


def machine_line(machine: Machine, generated: bool) -> str:
    """The GPU of this machine in a sentence, as HTML."""
    if machine.note:
        return f'<span class="hp-warn">No GPU can be used: {esc(machine.note)}.</span>'
    if machine.vram_gb:
        return f"GPU found: <strong>{esc(machine.gpu_name)}</strong>, {machine.vram_gb:g} GB."
    if generated:
        return "No NVIDIA GPU found. Tiny Flux does not need one."
    return (
        "No NVIDIA GPU found. FLUX.1 needs one with at least 12 GB. Try Hangproof here with Tiny Flux, or choose the VRAM of "
        "the machine that you will train on."
    )


def html(values: Mapping[str, Any], spec: "runs.RunSpec | None") -> str:
    """The notes as HTML; "" for a model or tier that does not exist. `spec`: None where a field is invalid."""
    model = presets.models().get(values["model"])
    if model is None or values["tier"] not in presets.tiers() or values["backend"] not in model["backends"]:
        return ""
    tier = presets.tiers_of(values["model"], values["backend"])[values["tier"]]
    licence = esc(model["licence"])
    if model["repo"].count("/") == 1:
        licence = hub_login.hub_link(model["repo"], model["licence"])
    about = f"<strong>{esc(model['name'])}</strong>. {esc(model['note'])} Licence: {licence}."
    lines = [
        about,
        f"{machine_line(this_machine(values['backend']), model['generated'])} {esc(tier['label'])}: {esc(tier['note'])}.",
    ]
    if spec is not None:
        lines += _next_steps(spec)
    return "".join(f'<p class="hp-hint">{line}</p>' for line in lines)


def _next_steps(spec: "runs.RunSpec") -> list[str]:
    """What to do before the run can start, as HTML: accept the licence and log in, or download the missing files."""
    if repo := weights.needs_login(spec):
        size_gb = weights.to_download(spec)[0] / 1e9
        link = hub_login.hub_link(repo, f"accept the licence of {repo} on Hugging Face")
        return [
            f"This model is not on this machine yet. Before the first run, {link} and log in under “{hub_login.LABEL}” below. "
            f"The run then downloads {size_gb:.0f} GB."
        ]
    if presets.backends()[spec.backend]["loads"] == "files" and (names := weights.missing(spec)):
        size_gb = weights.to_download(spec)[0] / 1e9
        size = f" ({size_gb:.0f} GB)" if size_gb >= 1 else ""
        files = f"{len(names)} model file{'s' * (len(names) > 1)}{size} missing: {', '.join(names)}."
        return [
            esc(files)
            + (
                ""
                if presets.models()[spec.model]["generated"]
                else " Download them here, or put them into the models folder."
            )
        ]
    return [esc(note)] if (note := weights.note(spec)) else []
