"""The fold with all options of the chosen trainer, below "Extra trainer options": a table with a search.

Options are set in that field, whose lines `runs` validates. They are read from the trainer's source when the fold is
opened, because reading them takes longer than opening the page.
"""

import re
from typing import Any

import gradio as gr

import presets
import runs
from runs.files import RunError
from runs.paths import CHECKOUTS, START
from ui.html import esc, table
from ui.new import form
from ui.run import fold
from ui.run.fold import QUIET

HEADS = ["Option", "What it does", "Type", "Default", "In this run"]
TYPES = {"bool": "switch", "int": "whole number", "float": "number", "str": "text"}
LISTS = {"text": "list of words"}
JAPANESE = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
NOT_INSTALLED = (
    f"{{label}} is not installed, so its options cannot be listed. Run {START} {{backend}} (or set {{variable}}_DIR), then "
    "close and reopen this list."
)


def rows(values: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """The options by name: (name, what it does, type, default, its value in this run's command).

    Raises:
        RunError, PresetError: the trainer is not installed, or cannot train the model.
    """
    from runs.command import flags
    from runs.flags import known_flags  # imports what reads a trainer's source

    usual = runs.make({"name": "my-lora", **{key: values[key] for key in ("model", "tier", "backend")}})
    spec = form.parse(values)[0] or usual
    known = known_flags(spec.backend, presets.models()[spec.model]["family"])
    if not known:
        label, variable = form.BACKENDS[spec.backend], CHECKOUTS[spec.backend].variable
        raise RunError(NOT_INSTALLED.format(label=label, backend=spec.backend, variable=variable))
    try:
        now = flags(spec, runs.outputs_dir() / spec.slug)
    except RunError:  # samples without a prompt
        now = flags(usual, runs.outputs_dir() / spec.slug)
    found = []
    for name, one in sorted(known.items()):
        default = "computed" if one.get("default_is_computed") else _text(one["default"]) or "–"
        found.append((name, brief(one["help"] or ""), _kind(one), default, _text(now.get(name))))
    return found


def _kind(entry: dict[str, Any]) -> str:
    """An option's type, and its choices."""
    kind = TYPES.get(entry["type"], entry["type"])
    kind = LISTS.get(kind, f"list of {kind}s") if entry["nargs"] else kind
    choices = ["true", "false"] if entry["type"] == "bool" else [str(one) for one in entry["choices"] or ()]
    return f"{kind}: {', '.join(choices)}" if choices else kind


def brief(text: str) -> str:
    """The English part of a help text; sd-scripts writes "English / Japanese"."""
    parts = text.split(" / ")
    english = next((n for n, part in enumerate(parts) if JAPANESE.search(part)), len(parts))
    return " / ".join(parts[: max(1, english)])


def _text(value: object) -> str:
    """A value as text for the field; "" for None."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else f"{value:g}" if isinstance(value, float) else form.as_text(value)


def markup(values: dict[str, Any], words: str = "") -> str:
    """The options whose name or description has all the words, as a table; else why there are none."""
    head, wanted = f"Options of {form.BACKENDS.get(values['backend'], '')}", words.casefold().split()
    try:
        shown = [one for one in rows(values) if all(word in f"{one[0]} {one[1]}".casefold() for word in wanted)]
    except fold.ERRORS as error:
        return f"<h4>{esc(head)}</h4>{fold.note(error, True)}"
    none = fold.note("No option has these words in its name or description.")
    return f"<h4>{esc(head)}</h4>{table(head, HEADS, shown) or none}"


def draw(draft_id: str, images: Any) -> None:
    """Make the components of the fold. images: the component whose event `chosen` says that the model, the VRAM or the
    trainer changed."""

    def found(words: str = "") -> str:
        return markup(form.current(draft_id), words)

    about = "By name and description. Type an option into the field above as name=value"
    search = fold.line("Search the options", about, elem_id="flag-search")
    shown = gr.HTML(found(), elem_id="flag-table", apply_default_css=False)
    search.change(found, search, shown, trigger_mode="always_last", **QUIET)
    images.chosen(found, search, shown, trigger_mode="always_last", key="flags-chosen", **QUIET)
