"""Every flag of the chosen trainer, to look up and to set: the table below "Further flags".

The box stays the only place where a flag is kept; the table writes lines into it and reads them back, so a person may
type instead. What may be in a line is judged by runs alone, here only asked line by line. The list is read from the
trainer's source when the table is first opened, never with the page.
"""

import re

import presets
import runs
from runs.flags import check_extra, known_flags, parse_settings
from runs.spec import ALIASES, RESERVED_FLAGS, RunSpec
from ui import form
from ui.html import esc, script

TYPES = {"bool": "switch", "int": "whole number", "float": "number", "str": "text"}
LISTS = {"text": "list of words"}
# Flags that follow from a field of the form which is called otherwise (runs/command.py).
FOLLOWS = {
    "save_precision": "mixed_precision",
    "sample_prompts": "prompts",
    "save_last_n_steps": "keep_states",
    "save_last_n_steps_state": "keep_states",
    "save_last_n_epochs_state": "keep_states",
}
JAPANESE = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
ABSENT = (
    "kohya's sd-scripts is not installed, so its flags cannot be listed; run ./start.sh sd-scripts "
    "(or set SD_SCRIPTS_DIR), then close and open this list"
)


def faults(values: dict) -> list[str]:
    """What is wrong with the lines of "Further flags", a sentence each, as runs judges them."""
    lines = [line for line in (values["flags"] or "").splitlines() if line.strip()]
    base = {"name": "my-lora", **{key: values[key] for key in ("model", "tier", "backend")}}
    if not lines or not _makes(base):
        return []  # a model that the trainer cannot train is told at the model, not once a flag
    found: dict[str, None] = {}
    for line in lines:
        try:
            check_extra(runs.make(parse_settings([line], base)))
        except (runs.RunError, presets.PresetError) as error:
            found |= dict.fromkeys(form.in_labels(str(error).replace("--set ", "")).splitlines())
    return list(found)


def _makes(fields: dict) -> bool:
    try:
        runs.make(fields)
    except runs.RunError:
        return False
    return True


def note(values: dict) -> str:
    """`faults` as HTML; "" when there are none."""
    lines = "".join(f"<li>{esc(line)}</li>" for line in faults(values))
    return f'<ul class="hp-flagnote" role="status">{lines}</ul>' if lines else ""


def judge_flag(data: dict) -> dict:
    """What runs says of one flag that is about to be set: {"faults": […]}."""
    known = {"model": presets.models(), "backend": form.BACKENDS}
    texts = {key: data.get(key) if isinstance(data, dict) else None for key in ("model", "backend", "name", "value")}
    fit = all(isinstance(text, str) for text in texts.values()) and all(texts[key] in known[key] for key in known)
    if not fit or len((texts["name"] + texts["value"]).splitlines()) > 1:
        return {"faults": ["the page and the server do not fit; reload the page"]}
    line = f"{texts['name']}={texts['value']}"
    tier = form.defaults()["tier"]
    return {"faults": faults({"model": texts["model"], "backend": texts["backend"], "tier": tier, "flags": line})}


def listing(values: dict) -> dict:
    """The table: {backend, model, label, problem, flags: [{name, type, choices, default, help, brief, by, value,
    locked}]}.

    `by` is who sets the flag already ("" nobody) and `value` to what; a `locked` one belongs to a field of the form, to
    the VRAM choice or to the run's folder, and is not changed here.
    """
    label = form.BACKENDS.get(values["backend"], "")
    shown = {"backend": values["backend"], "model": values["model"], "label": label, "problem": "", "flags": []}
    try:
        spec = runs.make({"name": "my-lora", **{key: values[key] for key in ("model", "tier", "backend")}})
        known = known_flags(spec.backend, presets.models()[spec.model]["family"])
    except (runs.RunError, presets.PresetError) as error:
        return {**shown, "problem": form.in_labels(str(error))}
    if not known:
        return {**shown, "problem": ABSENT}
    from runs.command import flags, model_files

    now = flags(spec, runs.outputs_dir() / spec.slug)
    tier = {**presets.defaults()["all"], **presets.tiers()[spec.tier]["flags"]}
    files = model_files(spec)
    return {**shown, "flags": [_row(name, entry, now, tier, files) for name, entry in sorted(known.items())]}


def _row(name: str, entry: dict, now: dict, tier: dict, files: dict) -> dict:
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
    """The English half of a help text: sd-scripts' are "English / Japanese", and a row of the table is one line."""
    parts = text.split(" / ")
    english = next((n for n, part in enumerate(parts) if JAPANESE.search(part)), len(parts))
    return " / ".join(parts[: max(1, english)])


def _text(value: object) -> str:
    """A value as it is written into the box; "" for none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def flags_view():
    """The component; empty until its value is a `listing`."""
    import gradio as gr

    return gr.HTML(
        value=None,
        html_template="",
        js_on_load=script("flags"),
        server_functions=[judge_flag],
        elem_id="all-flags",
        apply_default_css=False,
    )
