"""Notes on the chosen model and this machine: what the model needs, the GPU found, and the next step to use the model;
and the table of what all models need."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import presets
import runs
from guards import hub
from monitor.phrases import count
from runs import weights
from runs.machine import Machine, this_machine
from runs.paths import CHECKOUTS
from ui import jobs
from ui.html import esc, table
from ui.new import form, hub_login


def machine_line(machine: Machine, model: Mapping[str, Any], smallest: str) -> str:
    """The GPU of this machine in a sentence, as HTML. `smallest`: label of the smallest VRAM choice that holds the model."""
    if machine.note:
        return f'<span class="hp-warn">No GPU can be used: {esc(machine.note)}.</span>'
    if machine.vram_gb:
        return f"GPU found: <strong>{esc(machine.gpu_name)}</strong>, {machine.vram_gb:g} GB."
    if model["generated"]:
        return "No NVIDIA GPU found. Tiny Flux does not need one."
    return (
        f"No NVIDIA GPU found. {esc(model['name'])} needs one with at least {esc(smallest)}. Try Hangproof here with Tiny "
        "Flux, or choose the VRAM of the machine that you will train on."
    )


def html(values: Mapping[str, Any], spec: "runs.RunSpec | None") -> str:
    """The notes as HTML; "" for a model, trainer or tier that does not exist. `spec`: None where a field is invalid."""
    key, backend, tier = values["model"], values["backend"], values["tier"]
    model = presets.models().get(key)
    if model is None or tier not in presets.tiers() or backend not in presets.backends():
        return ""
    lines = [f"<strong>{esc(model['name'])}</strong>. {esc(model['note'])} Licence: {licence(model)}."]
    if len(model["backends"]) == 1:
        lines[0] += f" Only {esc(presets.backends()[model['backends'][0]]['label'])} can train it."
    if backend not in model["backends"]:
        return _paragraphs(lines)
    rows = presets.tiers_of(key, backend)
    chosen, smallest = rows[tier], rows[presets.smallest_tier(key, backend)]["label"]
    lines.append(machine_line(this_machine(backend), model, smallest))
    if chosen["problem"]:
        lines.append(
            f'<span class="hp-warn">{esc(chosen["label"])} is too small: {esc(chosen["basis"])}. Choose {esc(smallest)} or more.</span>'
        )
    else:
        needs = f"It uses {chosen['needs_gb']:g} GB with the model's usual settings ({chosen['basis']})."
        lines.append(f"{esc(chosen['label'])}: {esc(chosen['note'])}. {esc(needs)}")
    return _paragraphs([*lines, *(_next_steps(spec) if spec is not None else [])])


def licence(model: Mapping[str, Any]) -> str:
    """A model's licence, linked to its repository where the table names it, as HTML."""
    if model["repo"].count("/") == 1:
        return hub_login.hub_link(model["repo"], model["licence"])
    return esc(model["licence"])


def choices(values: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """(label, key) of each VRAM choice and trainer by field; the label says what the chosen model needs of it."""
    model, backend = presets.models().get(values["model"]), values["backend"]
    fitting = model["backends"] if model else form.BACKENDS
    needs = presets.tiers_of(values["model"], backend) if model and backend in fitting else {}
    tiers = {key: f" · {'' if row['problem'] else 'uses '}{_needs(row)}" for key, row in needs.items()}
    return {
        "tier": [(f"{tier['label']}{tiers.get(key, '')}", key) for key, tier in presets.tiers().items()],
        "backend": [
            (label if key in fitting else f"{label} · not for this model", key) for key, label in form.BACKENDS.items()
        ],
    }


def _paragraphs(lines: Iterable[str]) -> str:
    return "".join(f'<p class="hp-hint">{line}</p>' for line in lines)


def _next_steps(spec: "runs.RunSpec") -> list[str]:
    """What to do before the run can start, as HTML: install the trainer, accept the licence, download the missing files."""
    lines = []
    model, trainer = presets.models()[spec.model], presets.backends()[spec.backend]
    if spec.backend in CHECKOUTS and not CHECKOUTS[spec.backend].installed():
        lines.append(
            f"{esc(form.BACKENDS[spec.backend])} is not on this machine yet. In a terminal, in the Hangproof folder, run "
            f"<code>./start.sh {esc(spec.backend)}</code>."
        )
    if repo := weights.needs_login(spec):
        size_gb = weights.to_download(spec)[0] / 1e9
        link = hub_login.hub_link(repo, f"accept the licence of {repo} on Hugging Face")
        lines.append(
            f"This model is not on this machine yet. Before the first run, {link} and log in under “{hub_login.LABEL}” below. "
            f"The run then downloads {size_gb:.0f} GB."
        )
    elif trainer["loads"] == "files" and (names := weights.missing(spec)):
        size_gb = weights.to_download(spec)[0] / 1e9
        size = f" ({size_gb:.0f} GB)" if size_gb >= 1 else ""
        text = esc(f"{count(len(names), 'model file')}{size} missing: {', '.join(names)}.")
        if not model["generated"]:
            text += " Download them here, or put them into the models folder."
        if model["gated"] and not hub.token() and (repo := _gated_repo(model, names)):
            link = hub_login.hub_link(repo, f"accept the licence of {repo} on Hugging Face")
            text += f" Before the download, {link} and log in under “{hub_login.LABEL}” below."
        lines.append(text)
    elif note := weights.note(spec):
        lines.append(esc(note))
    return lines


def _gated_repo(model: Mapping[str, Any], names: list[str]) -> str:
    """The repository that asks for its licence: the model's own, else that of its first missing file, the model itself."""
    sources = presets.tables.downloads()
    return model["repo"] or next((sources[name]["repo"] for name in names if name in sources), "")


# The download: `python -m runs fetch-model` in the background. It continues what an earlier one kept --------------------

FETCH_S = 7 * 24 * 3600.0


def model_to_fetch(values: Mapping[str, Any]) -> str:
    """Key of the chosen model when its files must be downloaded first; "" when nothing is missing."""
    model, trainer = presets.models().get(values["model"]), presets.backends().get(values["backend"])
    if model is None or model["generated"] or trainer is None or trainer["loads"] != "files" or not model["files"]:
        return ""
    return values["model"] if runs.missing_files(values["model"]) else ""


def fetch(key: str) -> None:
    """Start or continue the download. Raises RunError: the models folder cannot be written, or another page has just started it."""
    if not fetching(key)[0]:
        jobs.start(runs.models_dir(), f"fetch-{runs.slug(key)}", ["runs", "fetch-model", key], FETCH_S)


def fetching(key: str) -> tuple[bool, str]:
    """(whether the page is downloading this model's files, the progress or why it failed as HTML)."""
    folder, name = runs.models_dir(), f"fetch-{runs.slug(key)}"
    if (job := jobs.read(folder, name)) is None:
        return False, ""
    last = esc(jobs.reason(folder, name, "contacting the server…"))  # its progress, while it runs
    if job.state == "running":
        return True, f'<p class="hp-hint" role="status" data-testid="fetching">Downloading: {last}</p>'
    failed = f'<p class="hp-hint" role="alert" data-testid="fetch-error"><span class="hp-warn">{last}</span></p>'
    return False, failed if runs.missing_files(key) else ""


# The table of all base models, made when it is opened: it is larger than the rest of the form ------------------------

INTRO = (
    "GPU memory that each model uses with its usual settings. Where the figure is smaller than the choice, the rest stays "
    "free. The notes above say where the figures of the chosen model come from."
)


def table_html(machine: Machine) -> str:
    """The table as HTML; the head of the choice that suits this machine's GPU says so."""
    own = own_tier(machine)
    tiers = [f"{tier['label']}{' (your GPU)' * (name == own)}" for name, tier in presets.tiers().items()]
    rows = (row for _, key in form.model_choices() for row in rows_of(key))
    shown = table("Base models and the GPU memory they use", ["Base model", "Trainer", *tiers, "Licence"], rows)
    return f'<p class="hp-hint">{INTRO}</p><div data-testid="models">{shown}</div>'


def own_tier(machine: Machine) -> str:
    """The largest VRAM choice that this machine's GPU has the memory for; "" without a GPU, or with a smaller one."""
    vram_gb = round(machine.vram_gb or 0)
    held = [name for name, tier in presets.tiers().items() if tier["vram_gb"] <= vram_gb]
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
