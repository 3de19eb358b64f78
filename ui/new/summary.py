"""What the page says of a draft's settings: the plan of step 3 with its estimates, and the notes on the base model and
this machine, with the download of its files; and the table of what all models need."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gradio as gr

import presets
import runs
from guards import hub
from monitor.phrases import count
from presets.estimate import cost, disk, estimate
from presets.steps import held_out
from runs import history, weights
from runs.command import world
from runs.dataset import shown_per_epoch
from runs.machine import Machine, free_gb, this_machine
from runs.manage import size_text
from runs.paths import CHECKOUTS, START
from runs.spec import RunSpec
from ui import jobs
from ui.dataset import draft
from ui.html import duration, esc, hub_link, table
from ui.new import form, hub_login, script_editor
from ui.run.readers import latest

GPU = "GPU memory and trainer"


def save_settings(draft_id: str, changes: dict[str, Any], starting: bool = False) -> dict[str, Any]:
    """Store `changes`; returns `values`, all settings as they are now, `marks`, what is wrong with them by field, and what
    `said` gives. starting: whether what is only missing is wrong too."""
    if changes:
        form.save(draft_id, changes, typed=True)
    try:
        found = form.reviewed(draft_id)
        return {"values": found.values, "marks": found.marks(starting), "said": said(draft_id, found)}
    except presets.PresetError as error:  # what was typed is stored
        said_of_it = f'<p class="hp-plan hp-warn">{esc(error)}</p>'
        return {"values": draft.form(draft_id), "marks": {}, "said": (said_of_it, *[gr.skip()] * 7)}


def said(draft_id: str, found: form.Review) -> tuple[Any, ...]:
    """The plan, the model's notes with the download's progress, the choices of VRAM and trainer, the title of the GPU's
    fold, the model's own field, the download button, and the timer that polls the download; values and updates as a
    script of the page can return them to Gradio, too."""
    edited, values = draft.edited_script(draft_id).is_file(), found.values
    planned = script_editor.reviewed(draft_id, found) if edited else found
    given = form.judged(planned.spec), planned.images, planned.steps
    shown = latest("plan", None, given, lambda: plan(planned)) + estimates(planned) + findings(found)
    key = model_to_fetch(values)
    busy, fetched = fetching(key) if key else (False, "")
    tier, backend = presets.tiers()[values["tier"]]["label"], form.BACKENDS[values["backend"]]
    return (
        shown,
        model_notes(values, found.spec) + fetched,
        *(gr.update(choices=one) for one in gpu_choices(values).values()),
        gr.update(label=f"{GPU}: {tier}, {backend}"),
        gr.update(visible=bool(presets.models()[values["model"]]["control"])),
        gr.update(visible=bool(key) and not busy),
        gr.update(active=busy),
    )


def plan(review: form.Review) -> str:
    """The number of steps and how it is computed, as HTML."""
    spec, total = review.spec, sum(review.images.values())
    if not total:
        return '<p class="hp-plan">Add images in step 1 to see the number of training steps.</p>'
    if spec is None:
        return '<p class="hp-plan">The number of training steps appears here once the errors below are fixed.</p>'
    held = held_out(review.images, spec.validation_split, spec.backend)
    left = {name: number - held[name] for name, number in review.images.items()}
    parts = [count(total, "image")]
    parts[0] += f", {sum(held.values())} held out" * any(held.values())
    if not spec.max_train_steps:
        shown_images = shown_per_epoch(left, spec.repeats)
        if shown_images == sum(left.values()) * spec.repeats:
            parts.append(count(spec.repeats, "repeat"))
        else:  # subsets with their own repeats, images with a weight
            parts = [f"{parts[0]}, shown {shown_images:,} times an epoch"]
        parts.append(count(spec.epochs, "epoch"))
    batch = spec.batch_size * spec.gradient_accumulation * world(spec)
    size = f"{', ' if spec.max_train_steps else ' ÷ '}batch {batch}" * (batch > 1)
    equals = ":" if spec.max_train_steps else " ="
    note = " With one image, the LoRA memorizes that image. Use 10 to 30 images." if total == 1 else ""
    return f'<p class="hp-plan">{" × ".join(parts)}{size}{equals} <strong>{review.steps:,} steps</strong>.{note}</p>'


def findings(review: form.Review) -> str:
    """What prevents the start, and the warnings, as HTML; "" where there is nothing."""
    lines = [f'<li class="hp-bad">{esc(form.shown(fault))}</li>' for fault in review.faults]
    lines += [f'<li class="hp-warn">{esc(form.shown(fault))}</li>' for fault in review.warnings]
    return f'<div role="status"><ul class="hp-findings">{"".join(lines)}</ul></div>' if lines else ""


# Time, GPU memory, disk space and cost, and what each estimate is based on --------------------------------------------


def estimates(review: form.Review) -> str:
    """The estimates as HTML; "" without images or with invalid fields."""
    if not sum(review.images.values()) or (spec := review.spec) is None:
        return ""
    machine, download = this_machine(spec.backend), weights.to_download(spec)

    def make() -> dict[str, str]:
        seconds, source = history.expected(spec, review.steps)
        return {
            "Time": _time(spec, seconds, source, machine),
            "Cost": _cost(spec, seconds),
            "GPU memory": _memory(spec, machine),
            "Disk": _disk(spec, review.images, machine, *download),
        }

    given = form.judged(spec, machine), review.steps, review.images, history.earlier(spec.model_dump()), download
    lines = {**latest("estimates", None, given, make), "Samples": _samples(spec)}
    rows = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in lines.items() if text)
    return f'<dl class="hp-estimates" data-testid="estimates">{rows}</dl>'


def _time(spec: RunSpec, seconds: float, source: str, machine: Machine) -> str:
    toy = presets.models()[spec.model]["generated"]
    known = toy or machine.vram_gb or source.startswith("measured on this machine")
    where = "" if known else "On a GPU of this size: "
    unit = 5 if seconds < 120 else 60 if seconds < 3600 else 600  # as precise as an estimate is
    return f"{where}about {duration(max(unit, round(seconds / unit) * unit))} <span>({esc(source)})</span>"


def _cost(spec: RunSpec, seconds: float) -> str:
    """The cost at the price an hour; "" without a price."""
    if (found := cost(spec.model_dump(), seconds)) is None:
        return ""
    text = f"about {found:.2f} <span>(at {spec.price_per_hour:g} per hour)</span>"
    if not spec.spend_limit or found <= spec.spend_limit:
        return text
    limit = f"The spend limit of {spec.spend_limit:g} ends the run before. Raise the limit, or train fewer steps."
    return f'{text} <span class="hp-warn">{limit}</span>'


def _memory(spec: RunSpec, machine: Machine) -> str:
    found = estimate(spec.model_dump())
    needed_gb = found["peak_gb"]
    if presets.models()[spec.model]["generated"] and not machine.vram_gb:
        return "none; this model trains on the processor"
    text = f"about {needed_gb:.1f} GB at {spec.resolution} pixels"
    if machine.vram_gb and needed_gb > machine.vram_gb:
        return f'<span class="hp-warn">{text}; your GPU has {machine.vram_gb:g} GB. Lower the resolution, batch size or rank.</span>'
    text += f" <span>(your GPU has {machine.vram_gb:g} GB)</span>" if machine.vram_gb else ""
    return f"{text} <span>({esc(found['note'])})</span>"


def _disk(spec: RunSpec, images: Mapping[str, int], machine: Machine, download: float, folder: Path) -> str:
    written = disk(spec.model_dump(), images)
    parts = {**({"model download": download} if download else {}), **written}
    named = ", ".join(f"{name} {size_text(count)}" for name, count in parts.items())
    free = machine.free_disk_gb
    text = f"about {size_text(sum(parts.values()))} <span>({esc(named)}; {free:.0f} GB free)</span>"
    places = ((runs.data_root(), free, sum(written.values())), (folder, free_gb(folder), download))
    short = [f"{place} has {left:.1f} GB free" for place, left, needed in places if needed / 1e9 > left]
    if short:
        text += f' <span class="hp-warn">Too little space: {esc("; ".join(short))}. Free some space.</span>'
    return text


def _samples(spec: RunSpec) -> str:
    epochs = spec.extra.get("sample_every_n_epochs")  # which decides, where both are set
    if not (spec.sample_every_n_steps or epochs):
        if spec.sample_every_n_steps == 0 and not spec.prompts and not spec.trigger.strip():
            return "none: there is no trigger word, prompt or caption to draw"
        return "off"
    prompt = (spec.prompts or [spec.trigger])[0]
    more = f" and {len(spec.prompts) - 1} more" if len(spec.prompts) > 1 else ""
    when = f"{epochs} epochs" if epochs else f"{spec.sample_every_n_steps:,} steps"
    return f"every {esc(when)} <span>(“{esc(prompt)}”{more})</span>"


# Notes on the chosen model and this machine: what the model needs, the GPU found, and the next step -------------------


def machine_line(machine: Machine, model: Mapping[str, Any], smallest: str) -> str:
    """This machine's GPU in a sentence, as HTML. `smallest`: label of the smallest VRAM choice that holds the model."""
    if machine.note:
        return f'<span class="hp-warn">No GPU can be used: {esc(machine.note)}.</span>'
    if machine.vram_gb:
        return f"GPU found: <strong>{esc(machine.gpu_name)}</strong>, {machine.vram_gb:g} GB."
    if model["generated"]:
        return "No NVIDIA GPU found. Tiny Flux does not need one."
    return (
        f"No NVIDIA GPU found. {esc(model['name'])} needs one with at least {esc(smallest)}. Try Hangproof here with "
        "Tiny Flux, or choose the VRAM of the machine that you will train on."
    )


def model_notes(values: Mapping[str, Any], spec: RunSpec | None) -> str:
    """The notes as HTML. `spec`: None where a field is invalid."""
    key, backend, tier = values["model"], values["backend"], values["tier"]
    model = presets.models()[key]
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
        return hub_link(model["repo"], model["licence"])
    return esc(model["licence"])


def gpu_choices(values: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """(label, key) of each VRAM choice and trainer by field; the label says what the chosen model needs of it."""
    fitting, backend = presets.models()[values["model"]]["backends"], values["backend"]
    needs = presets.tiers_of(values["model"], backend) if backend in fitting else {}
    tiers = {key: f" · {'' if row['problem'] else 'uses '}{_needs(row)}" for key, row in needs.items()}
    return {
        "tier": [(f"{tier['label']}{tiers.get(key, '')}", key) for key, tier in presets.tiers().items()],
        "backend": [
            (label if key in fitting else f"{label} · not for this model", key) for key, label in form.BACKENDS.items()
        ],
    }


def _paragraphs(lines: Iterable[str]) -> str:
    return "".join(f'<p class="hp-hint">{line}</p>' for line in lines)


def _next_steps(spec: RunSpec) -> list[str]:
    """What to do before the run can start, as HTML: install the trainer, accept the licence, download files."""
    lines = []
    model, trainer = presets.models()[spec.model], presets.backends()[spec.backend]
    if spec.backend in CHECKOUTS and not CHECKOUTS[spec.backend].installed():
        lines.append(
            f"{esc(form.BACKENDS[spec.backend])} is not on this machine yet. In a terminal, in the Hangproof folder, "
            f"run <code>{START} {esc(spec.backend)}</code>."
        )
    if repo := weights.needs_login(spec):
        ask, size_gb = _ask_for_licence(repo, "first run"), weights.to_download(spec)[0] / 1e9
        lines.append(f"This model is not on this machine yet. {ask} The run then downloads {size_gb:.0f} GB.")
    elif trainer["loads"] == "files" and (names := weights.missing(spec)):
        size_gb = weights.to_download(spec)[0] / 1e9
        size = f" ({size_gb:.0f} GB)" if size_gb >= 1 else ""
        text = esc(f"{count(len(names), 'model file')}{size} missing: {', '.join(names)}.")
        if not model["generated"]:
            text += " Download them here, or put them into the models folder."
        sources = presets.tables.downloads()
        repo = model["repo"] or next((sources[name]["repo"] for name in names if name in sources), "")
        if model["gated"] and not hub.token() and repo:
            text += f" {_ask_for_licence(repo, 'download')}"
        lines.append(text)
    elif note := weights.note(spec):
        lines.append(esc(note))
    return lines


def _ask_for_licence(repo: str, before: str) -> str:
    link = hub_link(repo, f"accept the licence of {repo} on Hugging Face")
    return f"Before the {before}, {link} and log in under “{hub_login.LABEL}” below."


# The download: `python -m runs fetch-model` in the background. It continues what an earlier one kept ------------------

FETCH_S = 7 * 24 * 3600.0


def model_to_fetch(values: Mapping[str, Any]) -> str:
    """Key of the chosen model when its files must be downloaded first; "" when nothing is missing."""
    model, trainer = presets.models()[values["model"]], presets.backends()[values["backend"]]
    if model["generated"] or trainer["loads"] != "files" or not model["files"]:
        return ""
    return values["model"] if runs.missing_files(values["model"]) else ""


def fetch(key: str) -> None:
    """Start or continue the download. RunError: the folder cannot be written, or another page has just started it."""
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
    "GPU memory that each model uses with its usual settings. Where the figure is smaller than the choice, the rest "
    "stays free. The notes above say where the figures of the chosen model come from."
)


def model_choices() -> list[tuple[str, str]]:
    """(label, key) of every base model, by family. The label names the family where the model's name does not."""
    families, models = presets.families(), presets.models()
    order = list(families)
    found = []
    for key in sorted(models, key=lambda key: order.index(models[key]["family"])):
        name, family = models[key]["name"], families[models[key]["family"]]["name"]
        known = any(word in name.casefold() for word in family.casefold().split() if len(word) > 2)
        found.append((name if known or models[key]["generated"] else f"{name} · {family}", key))
    return found


def table_html(machine: Machine) -> str:
    """The table as HTML; the head of the choice that suits this machine's GPU says so."""
    vram_gb = round(machine.vram_gb or 0)
    own = next((name for name, tier in reversed(presets.tiers().items()) if tier["vram_gb"] <= vram_gb), "")
    tiers = [f"{tier['label']}{' (your GPU)' * (name == own)}" for name, tier in presets.tiers().items()]
    rows = (row for _, key in model_choices() for row in rows_of(key))
    shown = table("Base models and the GPU memory they use", ["Base model", "Trainer", *tiers, "Licence"], rows)
    return f'<p class="hp-hint">{INTRO}</p><div data-testid="models">{shown}</div>'


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
