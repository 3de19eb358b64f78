"""The table of all options of the chosen trainer, below "Extra trainer options".

Options are stored only as the text of that field: the table writes lines into it and reads them back, so a user can type
them instead. `runs` validates each line. The options are read from the trainer's source when the table is first opened,
because reading them takes longer than opening the page.
"""

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import presets
import runs
from runs.paths import CHECKOUTS
from runs.spec import ALIASES, RESERVED_FLAGS, RunSpec
from ui import scripts
from ui.dataset.images import OUT_OF_DATE
from ui.new import form

if TYPE_CHECKING:
    import gradio as gr

TYPES = {"bool": "switch", "int": "whole number", "float": "number", "str": "text"}
LISTS = {"text": "list of words"}
# Trainer flags that a form field with another name sets (runs/command.py).
FOLLOWS = {
    "save_precision": "mixed_precision",
    "sample_prompts": "prompts",
    "save_last_n_steps": "keep_states",
    "save_last_n_steps_state": "keep_states",
    "save_last_n_epochs_state": "keep_states",
}
JAPANESE = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
NOT_INSTALLED = (
    "{label} is not installed, so its options cannot be listed. Run ./start.sh {backend} (or set {variable}_DIR), then close "
    "and reopen this list."
)


def check_flag(data: dict[str, Any]) -> dict[str, Any]:
    """Validate one option before the table sets it: {"errors": [message, …]}."""
    known: dict[str, Collection[str]] = {"model": presets.models(), "backend": form.BACKENDS}
    keys = ("model", "backend", "name", "value")
    texts = {key: data[key] for key in keys if isinstance(data, dict) and isinstance(data.get(key), str)}
    valid = len(texts) == len(keys) and all(texts[key] in known[key] for key in known)
    if not valid or len((texts["name"] + texts["value"]).splitlines()) > 1:
        return {"errors": [OUT_OF_DATE]}
    chosen = {**form.defaults(), **form.model_values(texts["model"], texts["backend"]), "name": "my-lora"}
    chosen |= {"model": texts["model"], "backend": texts["backend"]}
    _, faults = form.parse({**chosen, "flags": ""})
    if faults:
        return {"errors": []}  # the model field reports a model that the trainer cannot train
    _, faults = form.parse({**chosen, "flags": f"{texts['name']}={texts['value']}"})
    return {"errors": [one.message if one.field == "extra" else form.shown(one) for one in faults]}


def listing(values: dict[str, Any]) -> dict[str, Any]:
    """The table: {backend, model, label, problem, flags: [{name, type, choices, default, help, brief, by, value,
    locked}]}.

    `by` names what sets the option already ("" for nothing) and `value` is that value. A `locked` option is set by a form
    field, by the VRAM choice or by the run's folder, and cannot be changed in the table.
    """
    from runs.flags import known_flags  # imports what reads a trainer's source

    label = form.BACKENDS.get(values["backend"], "")
    shown = {"backend": values["backend"], "model": values["model"], "label": label, "problem": "", "flags": []}
    try:
        spec = runs.make({"name": "my-lora", **{key: values[key] for key in ("model", "tier", "backend")}})
        known = known_flags(spec.backend, presets.models()[spec.model]["family"])
    except (runs.RunError, presets.PresetError) as error:
        return {**shown, "problem": str(error)}
    if not known:
        variable = CHECKOUTS[spec.backend].variable
        return {**shown, "problem": NOT_INSTALLED.format(label=label, backend=spec.backend, variable=variable)}
    from runs.command import flags, model_files, tier_flags

    now = flags(spec, runs.outputs_dir() / spec.slug)
    tier = tier_flags(spec)
    files = model_files(spec)
    return {**shown, "flags": [_row(name, entry, now, tier, files) for name, entry in sorted(known.items())]}


def _row(
    name: str, entry: dict[str, Any], now: dict[str, Any], tier: dict[str, Any], files: dict[str, Any]
) -> dict[str, Any]:
    by, value, locked = "", None, True
    field = FOLLOWS.get(name, ALIASES.get(name, name))
    if field in form.LABELS and field in RunSpec.model_fields:
        by = form.LABELS[field]
    elif name in RESERVED_FLAGS:
        by = "the run's folder"
    elif name in tier:
        by, value = form.LABELS["tier"], now[name]
    else:
        locked = False
        if name in now:
            by, value = (form.LABELS["model"] if name in files else "Hangproof"), now[name]
    kind = TYPES.get(entry["type"], entry["type"])
    return {
        "name": name,
        "switch": entry["type"] == "bool",
        "type": LISTS.get(kind, f"list of {kind}s") if entry["nargs"] else kind,
        "choices": [str(choice) for choice in entry["choices"] or ()],
        "default": "computed" if entry.get("default_is_computed") else _text(entry["default"]),
        "help": entry["help"] or "",
        "brief": brief(entry["help"] or ""),
        "by": by,
        "value": _text(value),
        "locked": locked,
    }


def brief(text: str) -> str:
    """The English part of a help text, for the one line of a table row; sd-scripts writes "English / Japanese"."""
    parts = text.split(" / ")
    english = next((n for n, part in enumerate(parts) if JAPANESE.search(part)), len(parts))
    return " / ".join(parts[: max(1, english)])


def _text(value: object) -> str:
    """A value as text for the field; "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def flags_view() -> "gr.HTML":
    """The component, empty until its value is a `listing`."""
    return scripts.component("flags", "all-flags", check_flag)
