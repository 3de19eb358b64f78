"""The fold "Templates and import" of step 1: settings from a name or from another trainer's files, shown before they are used.

The component's script (setup.js) asks these functions and shows what would change; nothing changes before "Use these settings".
The form's fields then change as if they were typed, so they are stored like every other edit.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import presets
import runs
from runs import env_file
from runs.files import RunError
from runs.machine import this_machine, tier_for
from ui import scripts
from ui.dataset import calls
from ui.new import form, settings, templates

if TYPE_CHECKING:
    import gradio as gr

    from runs.foreign_spec import Import

QUIET = ("same", "run")  # outcomes that change nothing
TEXT = 300  # characters of a value that is shown


def changes(values: Mapping[str, Any], now: Mapping[str, Any]) -> list[dict[str, str]]:
    """What the form would change: {key, label, before, after} for each field with another value."""
    return [
        {"key": key, "label": form.LABELS.get(key, key), "before": _shown(key, now[key]), "after": _shown(key, value)}
        for key, value in values.items()
        if key in form.KEYS and not form.same(value, now[key])
    ]


def _shown(key: str, value: object) -> str:
    """A value as the form shows it."""
    if key == "model":
        model = presets.models().get(str(value))
        return str(model["name"]) if model else str(value)
    if key == "tier":
        return str(presets.tiers().get(str(value), {}).get("label", value))
    if key == "backend":
        return form.BACKENDS.get(str(value), str(value))
    choices = next((one.choices for one in (*form.MORE, *form.SAMPLES) if one.key == key), ())
    if named := next((label for label, choice in choices if choice == value), ""):
        return named
    value = env_file.of_lines(value)[0] if key == "flags" and isinstance(value, str) else value
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= TEXT else text[: TEXT - 1] + "…"


# Import ------------------------------------------------------------------------------------------------------------------


def read_files(draft_id: str, files: list[tuple[str, str]]) -> dict[str, Any]:
    """What some configuration files of another trainer would change; nothing is changed.

    Returns:
        {kind, values: the form's values by field, changes, rows: [{name, value, outcome, text}], added, notes,
        folders: [{path, images, problem}]}

    Raises:
        RunError: the files cannot be imported; the message says why.
    """
    from runs.foreign import read
    from runs.foreign_spec import convert

    now, machine = settings.current(draft_id), this_machine()
    found = convert(read(files), tier_for(machine) if machine.vram_gb else "")
    values = form_values(found, now)
    return {
        "kind": found.kind,
        "values": values,
        "changes": changes(values, now),
        "rows": [{"name": r.name, "value": r.value, "outcome": r.outcome, "text": r.text} for r in found.rows],
        "added": found.added,
        "notes": found.notes,
        "folders": [_folder(one.path) for one in found.folders if one.path][:20],
    }


def form_values(found: "Import", now: Mapping[str, Any]) -> dict[str, Any]:
    """The form's values that an import sets; the other fields keep theirs."""
    fields = {key: value for key, value in found.fields.items() if value is not None}
    whole = "model" in fields
    base = {} if whole else {key: now[key] for key in ("model", "backend")}
    try:
        spec = runs.make({"name": "my-lora", **base, **fields})
    except RunError:
        return {key: value for key, value in fields.items() if key in form.KEYS}
    given = form.values_of_spec(spec, 0)
    given["flags"] += "".join(
        f"{name}={spec.environment[name]}\n" for name in spec.secrets
    )  # stored apart: draft.save_fields
    keys = set(found.fields) | ({*form.MODEL_FIELDS, "flags"} if whole else set())
    keys |= {"flags"} if given["flags"] else set()
    if not whole and given["flags"]:
        given["flags"] = f"{now['flags'].rstrip()}\n{given['flags']}".lstrip()
    return {key: given[key] for key in form.KEYS if key in keys}


def _folder(path: str) -> dict[str, Any]:
    """An image folder that a file names: how many images are there, or why none are."""
    from runs.dataset import is_image_name
    from ui.dataset import imports

    try:
        folder = imports.given_folder(path)
        count = sum(is_image_name(one) for one in _names(folder))
    except (RunError, OSError) as error:
        return {"path": path, "images": 0, "problem": str(error)}
    return {"path": str(folder), "images": count, "problem": "" if count else "No images in this folder"}


def _names(folder: Path) -> list[Path]:
    """The files of a folder and of its folders, at most 20,000."""
    found = []
    for one in sorted(folder.iterdir()):
        found += list(one.iterdir()) if one.is_dir() and not one.name.startswith(".") else [one]
        if len(found) > 20_000:
            break
    return found


# Calls of the script. Each takes a dict from the browser and checks every value ---------------------------------------------


def setup(data: dict[str, Any]) -> dict[str, Any]:
    """All calls of the fold: `do` is list, preview, save, rename, delete, restore or read."""
    return calls.answer_of(ACTIONS, data)


def _list(_draft_id: str, _data: dict[str, Any]) -> dict[str, Any]:
    return {"templates": templates.listing()}


def _preview(draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
    now = settings.current(draft_id)
    values = templates.values_of(data.get("key"), now)
    return {"values": values, "changes": changes(values, now)}


def _save(draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
    version = data.get("replace")
    return templates.save(data.get("name"), settings.current(draft_id), version if isinstance(version, str) else None)


def _rename(_draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
    return templates.rename(data.get("key"), data.get("name"))


def _delete(_draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"template": templates.delete(data.get("key"))}


def _restore(_draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
    return templates.restore(data.get("template"))


def _read(draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
    given = data.get("files")
    files = (
        [(one.get("name"), one.get("text")) for one in given if isinstance(one, dict)]
        if isinstance(given, list)
        else []
    )
    texts = [(name, text) for name, text in files if isinstance(name, str) and isinstance(text, str)]
    return read_files(draft_id, texts)


ACTIONS: dict[str, calls.Action] = {
    "list": _list,
    "preview": _preview,
    "save": _save,
    "rename": _rename,
    "delete": _delete,
    "restore": _restore,
    "read": _read,
}


def build() -> "gr.HTML":
    """The fold."""
    return scripts.component("setup", "setup", setup)
