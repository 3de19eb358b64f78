"""Templates: the form's settings under a name, without images, name and trigger word. Built-in ones are in presets/templates.toml.

One file each in the data folder's `templates/`, named by a digest of the template's name, so that no name is a path. A
template replaces another one only on purpose.
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import presets
from runs import env_file
from runs.files import RunError, atomic_write, explained
from runs.paths import data_root
from ui.new import form

LEFT_OUT = ("name", "trigger", "control_dir")  # of one LoRA, not of a kind of LoRA
MAX_NAME, MAX_BYTES, MAX_TEMPLATES = 80, 200_000, 1000
EXISTS = "A template named “{name}” exists already. Replace it, or choose another name"


def folder() -> Path:
    """Where the templates are."""
    return data_root() / "templates"


def listing() -> list[dict[str, Any]]:
    """All templates, the user's by name, then the built-in ones: {key, name, about, own, damaged}."""
    found = []
    for path in sorted(folder().glob("*.json"))[:MAX_TEMPLATES]:
        try:
            one = _read(path)
            found.append({"key": path.stem, "name": one["name"], "about": _about(one), "own": True})
        except RunError as error:
            found.append({"key": path.stem, "name": path.name, "about": str(error), "own": True, "damaged": True})
    return [*sorted(found, key=lambda one: str(one["name"]).casefold()), *_built_in()]


def _built_in() -> list[dict[str, Any]]:
    """The rows of presets/templates.toml, each with its values."""
    return [{**one, "own": False} for one in presets.read_table("templates.toml")["template"]]


def _about(one: Mapping[str, Any]) -> str:
    """What a template sets, in a few words."""
    values = one["values"]
    model = presets.models().get(str(values.get("model")))
    parts = [model["name"] if model else "", f"rank {values['rank']}" if "rank" in values else ""]
    parts += [f"{values['resolution']} pixels" if "resolution" in values else ""]
    return " · ".join([*(part for part in parts if part), f"saved {one['saved_at'][:10]}"])


def _path(name: str) -> Path:
    return folder() / f"{hashlib.sha256(name.casefold().encode('utf-8', 'replace')).hexdigest()[:24]}.json"


def _of_key(key: object) -> Path:
    if not isinstance(key, str) or len(key) != 24 or not set(key) <= set("0123456789abcdef"):
        raise RunError("There is no such template; reload the page")
    return folder() / f"{key}.json"


def _read(path: Path) -> dict[str, Any]:
    """A template's file. RunError: it is gone or damaged."""
    try:
        one = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(one["name"], str) or not isinstance(one["values"], dict):
            raise ValueError("a name and values are missing")
        return {"saved_at": "", **one, "values": _fields(one["values"])}
    except FileNotFoundError as error:
        raise RunError("This template was deleted in another window") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path} cannot be read; delete the template, or repair the file") from error


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the form has fields for, and only plain ones."""
    keys = [key for key in form.KEYS if key not in LEFT_OUT]
    plain = (str, int, float, bool, type(None))
    found = {key: values[key] for key in keys if key in values and isinstance(values[key], plain)}
    if isinstance(found.get("flags"), str):
        found["flags"] = env_file.of_lines(found["flags"])[0]
    return found


def clean_name(name: object) -> str:
    """A template's name: one line of 1 to 80 characters. RunError otherwise."""
    text = " ".join(name.replace("\0", " ").split()) if isinstance(name, str) else ""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if not text or len(text) > MAX_NAME:
        raise RunError(f"Give the template a name of 1 to {MAX_NAME} characters")
    return text


def save(name: object, values: Mapping[str, Any], replace: bool = False) -> dict[str, Any]:
    """Save the form's values as a template; returns {key, name}.

    Raises:
        RunError: the name is taken and not to be replaced, or the disk does not take it.
    """
    text = clean_name(name)
    path, saved_at = _path(text), datetime.now(UTC).isoformat(timespec="seconds")
    content = json.dumps({"name": text, "saved_at": saved_at, "values": _fields(values)}, indent=1)
    if len(content) > MAX_BYTES:
        raise RunError(f"The settings have more than {MAX_BYTES // 1000} kB; shorten the prompts")
    with explained("save the template"):
        folder().mkdir(parents=True, exist_ok=True)
        try:
            path.touch(exist_ok=replace)  # of two windows, one makes the file
        except FileExistsError:
            raise RunError(EXISTS.format(name=text)) from None
        atomic_write(path, content)
    return {"key": path.stem, "name": text}


def delete(key: object) -> None:
    """Delete a template."""
    path = _of_key(key)
    with explained("delete the template"):
        path.unlink(missing_ok=True)


def values_of(key: object, current: Mapping[str, Any]) -> dict[str, Any]:
    """The form's values that a template sets, by field.

    Args:
        current: the form's values; the trigger word is filled into prompts.

    Raises:
        RunError: there is no such template.
    """
    built_in = next((one for one in _built_in() if one["key"] == key), None)
    if built_in is None:
        values: dict[str, Any] = _read(_of_key(key))["values"]
        known = form.restored(values)  # without a choice that no longer exists, such as a removed base model
        return {name: known[name] for name in values}
    values = dict(built_in["values"])
    if "prompts" in values:
        word = " ".join(str(current.get("trigger") or "").split()) or "your trigger word"
        values["prompts"] = values["prompts"].strip().replace("{trigger}", word)
    return values
