"""The fold with all options of the chosen trainer, below "Extra trainer options".

Options are stored only as the text of that field: the fold writes lines into it, so a user can type them instead.
`runs` validates each line. The options are read from the trainer's source when the fold is opened, because reading them
takes longer than opening the page.
"""

import re
from collections.abc import Callable
from typing import Any

import gradio as gr

import presets
import runs
from runs.paths import CHECKOUTS
from runs.spec import ALIASES, RESERVED_FLAGS, RunSpec
from ui.html import esc
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


def errors(model: str, backend: str, name: str, value: str) -> list[str]:
    """What is wrong with the value of an option, as sentences."""
    chosen = {**form.defaults(), **form.model_values(model, backend), "name": "my-lora"}
    chosen |= {"model": model, "backend": backend}
    if form.parse({**chosen, "flags": ""})[1]:
        return []  # the model field reports a model that the trainer cannot train
    _, faults = form.parse({**chosen, "flags": f"{name}={value}"})
    return [one.message if one.field == "extra" else form.shown(one) for one in faults]


def with_flag(text: str, name: str, value: str | None) -> str:
    """The text of the field with one option set, or without it for None. All other lines stay as they were typed."""
    lines = text.split("\n")
    at = [n for n, line in enumerate(lines) if _name_of(line) == name]
    if value is None:
        return "\n".join(line for n, line in enumerate(lines) if n not in at)
    if at:
        lines[at[-1]] = f"{name}={value}"  # the last line wins
        return "\n".join(lines)
    return f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{name}={value}"


def _name_of(line: str) -> str:
    name, equals, _ = line.partition("=")
    return name.strip().removeprefix("--").replace("-", "_") if equals else ""


def _typed(text: str, name: str) -> str | None:
    """The value that the field sets for an option; None where it does not."""
    return next((line.partition("=")[2] for line in reversed(text.split("\n")) if _name_of(line) == name), None)


def listing(values: dict[str, Any]) -> dict[str, Any]:
    """The options: {label, problem, flags: [{name, type, choices, default, help, brief, by, value, locked}]}.

    `by` names what sets the option already ("" for nothing) and `value` is that value. A `locked` option is set by a
    form field, by the VRAM choice or by the run's folder, and cannot be changed here.
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
        "help": entry["help"] or "",
        "brief": brief(entry["help"] or ""),
        "by": by,
        "value": _text(value),
        "locked": locked,
    }


def brief(text: str) -> str:
    """The English part of a help text, for one line; sd-scripts writes "English / Japanese"."""
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


def _choices(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (" · ".join(filter(None, (one["name"], one["by"] and f"set by {one['by']}", one["brief"]))), one["name"])
        for one in found["flags"]
    ]


def _about(one: dict[str, Any], typed: str | None) -> str:
    """What an option does and what sets it, as markup."""
    facts = [f"Type: {one['type']}"]
    facts += [f"One of: {', '.join(one['choices'])}"] * bool(one["choices"])
    facts += [f"Default: {one['default']}"] * bool(one["default"])
    to = f", to {one['value']}" if one["value"] else ""
    sets = f"Set by: {one['by']}{to}." if one["by"] else ""
    lines = [one["help"] or "The trainer has no description of this option.", " · ".join(facts)]
    lines += [f"{sets} Change it there." if one["locked"] else sets]
    lines += [f"Your value: {typed}"] * (typed is not None)
    return "".join(f"<p>{esc(line)}</p>" for line in lines if line)


def _draw(draft_id: str, images: Any) -> None:
    def known() -> dict[str, Any]:
        try:
            return listing(settings.current(draft_id))
        except (runs.RunError, presets.PresetError) as error:
            return {"label": "the trainer", "problem": str(error), "flags": []}

    found = known()
    option = gr.Dropdown(
        _choices(found),
        value=None,
        label=f"Options of {found['label']}",
        info="Type to search names and descriptions",
        interactive=True,
        elem_id="flag-option",
    )
    about = gr.HTML(fold.note(found["problem"], True), elem_id="flag-about", apply_default_css=False)
    with gr.Row(elem_classes="hp-actions", visible=False) as row:
        value = gr.Textbox(label="Value", max_lines=1, interactive=True, elem_id="flag-value")
        put = gr.Button("Set", size="sm", elem_id="flag-set", scale=0, min_width=90)
        remove = gr.Button("Remove", size="sm", elem_id="flag-remove", scale=0, min_width=90)
    note = gr.HTML(elem_id="flag-note", apply_default_css=False)

    def on_option(name: str | None, said: str = "") -> list[Any]:
        one = next((one for one in known()["flags"] if one["name"] == name), None)
        if one is None:
            return ["", gr.update(visible=False), "", said]
        typed = _typed(settings.current(draft_id)["flags"], one["name"])
        shown = typed if typed is not None else one["value"]
        return [_about(one, typed), gr.update(visible=not one["locked"]), shown, said]

    def on_chosen() -> list[Any]:
        found = known()
        update = gr.update(choices=_choices(found), value=None, label=f"Options of {found['label']}")
        return [update, fold.note(found["problem"], True), gr.update(visible=False), "", ""]

    def save(name: str, value: str | None) -> list[Any]:
        values = settings.current(draft_id)
        wrong = [] if value is None else errors(values["model"], values["backend"], name, value.strip())
        if wrong or (value is not None and not value.strip()):
            return [*[gr.skip()] * 3, fold.note(" ".join(wrong) or f"{name}: enter a value", True)]
        try:
            text = with_flag(values["flags"], name, value and value.strip())
            settings.save(draft_id, {"flags": text}, typed=True)
        except runs.RunError as error:
            return [*[gr.skip()] * 3, fold.note(error, True)]
        return on_option(name, fold.note("Removed." if value is None else "Set."))

    shown = [about, row, value, note]
    option.input(on_option, option, shown, js=settings.FLUSH, **QUIET)
    images.chosen(on_chosen, None, [option, *shown], trigger_mode="always_last", **QUIET)
    saved = [
        gr.on([put.click, value.submit], save, [option, value], shown, js=settings.FLUSH, **QUIET),
        remove.click(lambda name: save(name, None), option, shown, js=settings.FLUSH, **QUIET),
    ]
    for event in saved:
        event.then(None, None, None, js=settings.SYNC, **QUIET)
