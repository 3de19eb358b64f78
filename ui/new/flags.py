"""The fold with all options of the chosen trainer, below "Extra trainer options": a table with a search.

Options are set in that field, whose lines `runs` validates. They are read from the trainer's source when the fold is
opened, because reading them takes longer than opening the page.
"""

import re
from collections.abc import Callable
from typing import Any

import gradio as gr

import presets
import runs
from runs.paths import CHECKOUTS
from runs.spec import ALIASES, RESERVED_FLAGS, RunSpec
from ui.html import esc, table
from ui.new import form, settings
from ui.run import fold
from ui.run.fold import QUIET

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


def listing(values: dict[str, Any]) -> dict[str, Any]:
    """The options: {label, problem, flags: [{name, type, choices, default, help, by, value, locked}]}.

    `by` names what sets the option already ("" for nothing) and `value` is that value. A `locked` option is set by a
    form field, by the VRAM choice or by the run's folder, and cannot be changed in "Extra trainer options".
    """
    from runs.flags import known_flags  # imports what reads a trainer's source

    label = form.BACKENDS.get(values["backend"], "")
    shown = {"label": label, "problem": "", "flags": []}
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
        "type": LISTS.get(kind, f"list of {kind}s") if entry["nargs"] else kind,
        "choices": ["true", "false"] if entry["type"] == "bool" else [str(one) for one in entry["choices"] or ()],
        "default": "computed" if entry.get("default_is_computed") else _text(entry["default"]),
        "help": brief(entry["help"] or ""),
        "by": by,
        "value": _text(value),
        "locked": locked,
    }


def brief(text: str) -> str:
    """The English part of a help text; sd-scripts writes "English / Japanese"."""
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


def build(draft_id: gr.BrowserState, images: Callable[[], Any]) -> None:
    """The fold. images: returns the component whose event `chosen` says that the model, the VRAM or the trainer changed."""
    fold.opened("All trainer options", "all-flags-fold", draft_id, lambda name: _draw(name, images()))


def markup(found: dict[str, Any], words: str = "") -> str:
    """The options of `listing` whose name or description has all the words, as a table."""
    wanted = words.casefold().split()
    shown = [one for one in found["flags"] if all(word in f"{one['name']} {one['help']}".casefold() for word in wanted)]
    rows = [(one["name"], one["help"], _kind(one), one["default"] or "–", _set_by(one)) for one in shown]
    heads = ["Option", "What it does", "Type", "Default", "Set by"]
    label = f"Options of {found['label']}"
    none = "" if found["problem"] else fold.note("No option has these words in its name or description.")
    return f"<h4>{esc(label)}</h4>{fold.note(found['problem'], True)}{table(label, heads, rows) or none}"


def _kind(one: dict[str, Any]) -> str:
    return f"{one['type']}: {', '.join(one['choices'])}" if one["choices"] else str(one["type"])


def _set_by(one: dict[str, Any]) -> str:
    """What sets an option; "" where it is free."""
    to = f", to {one['value']}" if one["value"] else ""
    there = ". Change it there" if one["locked"] else ""
    return f"{one['by']}{to}{there}" if one["by"] else ""


def _draw(draft_id: str, images: Any) -> None:
    def found(words: str = "") -> str:
        try:
            return markup(listing(settings.current(draft_id)), words)
        except (runs.RunError, presets.PresetError) as error:
            return fold.note(error, True)

    search = gr.Textbox(
        label="Search the options",
        info="By name and description. Type an option into the field above as name=value",
        max_lines=1,
        interactive=True,
        elem_id="flag-search",
    )
    shown = gr.HTML(found(), elem_id="flag-table", apply_default_css=False)
    search.change(found, search, shown, trigger_mode="always_last", **QUIET)
    images.chosen(found, search, shown, trigger_mode="always_last", **QUIET)
