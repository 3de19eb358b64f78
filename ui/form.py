"""Step 1 and step 3: the settings as fields, and from what was typed to a spec, a plan and a script.

The fields take anything: a value is judged by `RunSpec` alone, in words, so that nothing typed is refused by a
component in a way that loses it. Labels and help live in one table; defaults are those of presets/defaults.toml.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import presets
import runs
from presets.estimate import estimate
from runs import weights
from ui import draft
from ui.html import esc

BACKENDS = {"diffusers": "Built in", "sd-scripts": "kohya's sd-scripts"}
# What a base model may bring along; choosing a model sets these to the model's own value or back to the default.
MODEL_FIELDS = ("resolution", "mixed_precision", "sample_steps")


@dataclass(frozen=True)
class Field:
    """One setting: how it is asked for. `kind`: whole, text, lines or choice; `key`: its name in RunSpec."""

    key: str
    label: str
    kind: str
    info: str = ""
    choices: tuple = ()


LENGTH = (
    Field("repeats", "Repeats", "whole", "times each image is shown in an epoch"),
    Field("epochs", "Epochs", "whole", "rounds through all images"),
    Field("resolution", "Resolution", "whole", "pixels, a multiple of 32"),
)
MORE = (
    Field("rank", "Rank", "whole", "size of the LoRA; 4 to 32"),
    Field("alpha", "Alpha", "text", "scale of the LoRA"),
    Field("learning_rate", "Learning rate", "text", "how fast it learns"),
    Field("batch_size", "Batch size", "whole", "images a step"),
    Field("gradient_accumulation", "Gradient accumulation", "whole", "batches a step"),
    Field("max_train_steps", "Stop after steps", "text", "empty: by the epochs"),
    Field("save_every_n_epochs", "LoRA saved every … epochs", "whole", "0: only at the end"),
    Field("save_every_n_steps", "Checkpoint every … steps", "text", "empty: a tenth of the run"),
    Field("keep_states", "Checkpoints kept", "whole", "the newest ones"),
    Field("seed", "Seed", "whole", "same seed, same run"),
    Field("workers", "Loader workers", "whole", "processes that read images"),
    Field(
        "mixed_precision", "Precision", "choice", "bf16 on most GPUs", (("bf16",) * 2, ("fp16",) * 2, ("float32", "no"))
    ),
    Field(
        "trackers",
        "Tracker",
        "choice",
        "also keeps the loss",
        (("none", ""), ("TensorBoard", "tensorboard"), ("wandb", "wandb")),
    ),
)
SAMPLES = (
    Field("prompts", "Sample prompts, one a line", "lines", "Left empty, the trigger word is the prompt."),
    Field("sample_every_n_steps", "Draw samples every … steps", "whole", "0: none"),
    Field("sample_steps", "Denoising steps of a sample", "whole", "more: finer, slower"),
)
FLAGS = Field("flags", "Further flags, one a line", "lines", "By the trainer's names, e.g. noise_offset=0.05")
HEAD = ("name", "trigger", "model", "tier", "backend")
KEYS = (*HEAD, *(field.key for field in (*LENGTH, *SAMPLES, *MORE, FLAGS)))


LABELS = {"name": "Name", "trigger": "Trigger word", "model": "Base model", "tier": "VRAM", "backend": "Trainer"}
LABELS |= {field.key: field.label for field in (*LENGTH, *SAMPLES, *MORE)}
FLAGS_LABEL = "Further flags"
BY_LABEL = {**{label: key for key, label in LABELS.items()}, FLAGS_LABEL: "flags", "Images": "images"}


def defaults() -> dict:
    """What the form starts from, by key."""
    table = presets.defaults()["run"]
    empty = {"name": "", "trigger": "", "prompts": "", "flags": "", "max_train_steps": "", "trackers": ""}
    values = {key: table.get(key, empty.get(key, "")) for key in KEYS}
    return {**values, "alpha": f"{table['alpha']:g}", "learning_rate": f"{table['learning_rate']:g}"}


def restored(stored: dict) -> dict:
    """Stored values laid over the defaults; a choice that is gone (a model removed from the table) is left out."""
    allowed = {"model": presets.models(), "tier": presets.tiers(), "backend": BACKENDS}
    allowed |= {field.key: [value for _, value in field.choices] for field in MORE if field.kind == "choice"}
    kept = {k: v for k, v in stored.items() if k in KEYS and (k not in allowed or v in allowed[k])}
    return {**defaults(), **kept}


def spec_of(values: dict) -> "runs.RunSpec":
    """The run that the form describes.

    Raises:
        runs.RunError: one line for each field that is wrong.
    """
    from runs.flags import parse_settings

    known = {field.key: field for field in (*LENGTH, *MORE, *SAMPLES)}
    given, faults = {key: values[key] for key in HEAD}, []
    if not (values["name"] or "").strip():
        faults.append("Name: the LoRA has none yet; type one, e.g. my-lora")
        given["name"] = "my-lora"  # so that the rest is judged, too
    for key, field in known.items():
        value = values[key]
        empty = value is None or (isinstance(value, str) and not value.strip())
        if key == "prompts":
            given[key] = [line for line in (value or "").splitlines() if line.strip()]
        elif key in ("max_train_steps", "save_every_n_steps", "trackers"):
            given[key] = (None if key != "trackers" else "") if empty else value
        elif empty:
            faults.append(f"{field.label}: is empty; the default is {defaults()[key]}")
        else:
            given[key] = value
    settings = [line for line in (values["flags"] or "").splitlines() if line.strip()]
    spec = None
    try:
        given = parse_settings(settings, given)
    except runs.RunError as error:
        faults += [
            f"{FLAGS_LABEL}: {line.removeprefix('--set ').replace('--set ', '')}" for line in str(error).splitlines()
        ]
    try:
        spec = runs.make(given)
    except runs.RunError as error:
        faults += in_labels(re.sub(r"(?m)^extra: ", "flags: ", str(error))).splitlines()
    if faults:
        raise runs.RunError("\n".join(faults))
    return spec


def in_labels(message: str) -> str:
    """A fault with the label that the page shows in place of the spec's key."""
    lines = []
    for line in message.splitlines():
        key, colon, rest = line.partition(":")
        label = {**LABELS, "flags": FLAGS_LABEL}.get(key) if colon else None
        lines.append(f"{label}:{rest}" if label else line.removeprefix("spec: ").removeprefix("extra: "))
    return "\n".join(lines)


def by_field(message: str) -> dict[str, str]:
    """The faults of a message that belong to a field, by its key: they are shown beside it as well."""
    found: dict[str, list[str]] = {}
    for line in message.splitlines():
        label, colon, rest = line.partition(": ")
        if colon and label in BY_LABEL:
            found.setdefault(BY_LABEL[label], []).append(rest)
    return {key: "\n".join(lines) for key, lines in found.items()}


def faults(values: dict) -> dict[str, str]:
    """What is wrong with what was typed so far, by field; a name that is still to come is no fault before the start."""
    try:
        spec_of({**values, "name": values["name"] or "my-lora"})
    except runs.RunError as error:
        return by_field(str(error))
    return {}


def values_of_spec(spec: "runs.RunSpec", images: int) -> dict:
    """What would have to be typed to get this run once more, on so many images; the reverse of `spec_of`.

    A field of the spec that the form does not ask for goes into "Further flags" where it differs from the default.
    """
    from runs.folders import with_save_interval

    fields, plain = spec.model_dump(), runs.make({"name": spec.name, "model": spec.model}).model_dump()
    if images and with_save_interval(spec.changed(save_every_n_steps=None), images) == spec:
        fields["save_every_n_steps"] = None  # as it is when left empty
    values = {key: fields.pop(key) for key in KEYS if key in fields}
    values |= {"prompts": "\n".join(spec.prompts), "alpha": str(spec.alpha), "learning_rate": str(spec.learning_rate)}
    values |= {
        key: "" if values[key] is None else str(values[key]) for key in ("max_train_steps", "save_every_n_steps")
    }
    lines = {key: value for key, value in fields.items() if key not in ("extra", "environment") and value != plain[key]}
    for field in MORE:
        if field.kind == "choice" and values[field.key] not in dict(field.choices).values():
            lines[field.key] = values.pop(field.key)
    lines |= spec.extra
    values["flags"] = "".join(f"{key}={_typed(value)}\n" for key, value in lines.items())
    return {**defaults(), **values}


def _typed(value: object) -> str:
    """A flag's value as a line holds it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else str(value)


def free_name(name: str) -> str:
    """The name, or the first of `name 2`, `name 3`, … that no run has."""
    number = 1
    while (runs.outputs_dir() / runs.slug(name if number == 1 else f"{name} {number}")).exists():
        number += 1
    return name if number == 1 else f"{name} {number}"


def start_problems(spec: "runs.RunSpec", ask: bool = False) -> list[str]:
    """What stands in the way of a start apart from the images, which are not in the data set yet; `ask`: as runs.problems."""
    data = str(runs.datasets_dir() / spec.slug)
    return [
        problem.replace("with --set ", f"under {FLAGS_LABEL}: ")
        for problem in runs.problems(spec, ask=ask)
        if not problem.startswith(f"no images in {data}")
    ]


def plan(values: dict, images: int) -> str:
    """How long the run will be, as HTML."""
    if not images:
        return '<p class="hp-plan">Add images in step 2 to see how many steps the run will have.</p>'
    try:
        spec = spec_of({**values, "name": values["name"] or "my-lora"})
        steps = runs.planned_steps(spec, images)
    except runs.RunError as error:
        return f'<p class="hp-plan">{esc(str(error).splitlines()[0])}</p>'
    parts = [f"{images} image{'s' * (images != 1)}"]
    if not spec.max_train_steps:
        parts += [f"{spec.repeats} repeat{'s' * (spec.repeats != 1)}", f"{spec.epochs} epoch{'s' * (spec.epochs != 1)}"]
    parts += [f"batch {spec.batch_size * spec.gradient_accumulation}"] * (
        spec.batch_size * spec.gradient_accumulation > 1
    )
    note = " One image only: the LoRA will learn that very picture; 10 to 30 are better." if images == 1 else ""
    return f'<p class="hp-plan">{" × ".join(parts)} = <strong>{steps:,} steps</strong>.{note}</p>'


def script_of(values: dict, images: int) -> str:
    """The script that Start would write; "" with what is missing told elsewhere.

    Raises:
        runs.RunError: as spec_of.
    """
    from runs.folders import with_save_interval

    spec = spec_of(values)
    if spec.save_every_n_steps is None and images:
        spec = with_save_interval(spec, images)
    return runs.script(spec, runs.outputs_dir() / spec.slug)


def model_note(values: dict) -> str:
    """What was chosen, as HTML: the model's licence, what the tier means, and what is missing on this machine."""
    model, tier = presets.models().get(values["model"]), presets.tiers().get(values["tier"])
    if model is None or tier is None:
        return ""
    lines = [f"{esc(model['name'])}, licence: {esc(model['licence'])} · {esc(tier['label'])}: {esc(tier['note'])}"]
    try:
        spec = spec_of({**values, "name": "my-lora"})
        need, have = estimate(spec.model_dump())["peak_gb"], tier["vram_gb"]
        lines[0] += f" · about {need:.1f} GB of GPU memory at {spec.resolution} pixels"
        if need > have:
            much = f"That is more than {have} GB: a lower resolution, batch size or rank needs less."
            lines.append(f'<span class="hp-warn">{much}</span>')
        lines += [f'<span class="hp-warn">{esc(problem)}</span>' for problem in start_problems(spec)]
        lines += [esc(note)] if (note := weights.note(spec)) and len(lines) == 1 else []
    except runs.RunError:
        pass  # told at the start button; here only the model counts
    return "".join(f'<p class="hp-hint">{line}</p>' for line in lines)


def model_values(key: str, backend: str) -> dict:
    """What choosing a base model sets: its trainer, and the fields it brings along."""
    model = presets.models()[key]
    table = presets.defaults()["run"]
    values = {field: model["settings"].get(field, table[field]) for field in MODEL_FIELDS}
    return {"backend": backend if backend in model["backends"] else model["backends"][0], **values}


def create(values: dict, draft_id: str) -> tuple[Path, list[str]]:
    """Make the run of the form and the draft's images.

    Returns:
        The run's folder, and sentences on what was changed.

    Raises:
        runs.RunError: what is wrong, a line each; nothing has been made then and the draft is as it was.
    """
    faults = []
    try:
        spec = spec_of(values)
        faults += start_problems(spec, ask=True)
        if (runs.outputs_dir() / spec.slug).exists():
            faults.append(f"Name: a run called {spec.name!r} exists; choose another name")
    except runs.RunError as error:
        faults += str(error).splitlines()
    images = draft.items(draft_id)
    if not images:
        faults.append("Images: there are none yet; drop some in step 2 (10 to 30 make a good LoRA)")
    if faults:
        raise runs.RunError("\n".join(faults))
    told: list[str] = []
    paths = [draft.images_dir(draft_id) / item.file for item in images]
    folder = runs.create(spec, paths, {item.file: item.caption for item in images}, tell=told.append)
    draft.in_a_run(draft_id)
    return folder, told
