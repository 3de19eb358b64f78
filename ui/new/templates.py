"""Templates: the form's settings under a name, without images, name and trigger word. Built-in ones are in presets/templates.toml.

One file each in the data folder's `templates/`, named by a digest of the template's name, so that no name is a path. A new
template never replaces another one. Saving over one names the version that was seen: a lock makes the comparison and the
replacement one act, so that of two browsers that save the same template one learns what the other changed.
"""

import contextlib
import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import presets
from monitor.process.locks import Lock
from runs import env_file
from runs.files import RunError, atomic_write, explained
from runs.paths import data_root
from ui.new import form
from ui.new.form_fields import LABELS

LEFT_OUT = ("name", "trigger", "control_dir")  # of one LoRA, not of a kind of LoRA
MAX_NAME, MAX_BYTES, MAX_TEMPLATES = 80, 200_000, 1000
EXISTS = "A template named “{name}” exists already. Replace it, or choose another name"
CHANGED = "The template “{name}” was changed in another window since you opened the list: {what}. Look at it again before you replace it"
LOCK_S = 10.0


def folder() -> Path:
    """Where the templates are."""
    return data_root() / "templates"


def listing() -> list[dict[str, Any]]:
    """All templates, the user's by name, then the built-in ones: {key, name, about, own, version, damaged}."""
    found = []
    for path in sorted(folder().glob("*.json"))[:MAX_TEMPLATES]:
        try:
            one = _read(path)
            found.append(
                {"key": path.stem, "name": one["name"], "about": _about(one), "own": True, "version": one["version"]}
            )
        except RunError as error:
            found.append(
                {"key": path.stem, "name": path.name, "about": str(error), "own": True, "version": "", "damaged": True}
            )
    found.sort(key=lambda one: str(one["name"]).casefold())
    built_in = [{**_built_in_row(one), "own": False, "version": ""} for one in _built_in()]
    return [*found, *built_in]


def _built_in() -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = presets.tables._table("templates.toml")["template"]
    return table


def _built_in_row(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"key": one["key"], "name": one["name"], "about": one["about"]}


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
        return {"version": "", "saved_at": "", **one, "values": _fields(one["values"])}
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


def save(name: object, values: Mapping[str, Any], replace: str | None = None) -> dict[str, Any]:
    """Save the form's values as a template.

    Args:
        replace: the version that is replaced; None for a new one.

    Returns:
        {key, name, version}.

    Raises:
        RunError: the name is taken, the template changed since, or the disk does not take it.
    """
    text = clean_name(name)
    path, version = _path(text), secrets.token_hex(8)
    saved_at = datetime.now(UTC).isoformat(timespec="seconds")
    content = json.dumps({"name": text, "version": version, "saved_at": saved_at, "values": _fields(values)}, indent=1)
    if len(content) > MAX_BYTES:
        raise RunError(f"The settings have more than {MAX_BYTES // 1000} kB; shorten the prompts")
    with _locked("save the template"):
        if replace is None:
            _refuse_taken(path, text)
        elif (now := _read(path))["version"] != replace:
            raise RunError(CHANGED.format(name=text, what=_difference(now["values"], _fields(values))))
        atomic_write(path, content)
    return {"key": path.stem, "name": text, "version": version}


@contextlib.contextmanager
def _locked(what: str) -> Iterator[None]:
    """Keep other threads and processes from changing a template. RunError: the disk does not take it."""
    with explained(what):
        folder().mkdir(parents=True, exist_ok=True)
        lock = Lock(folder() / ".lock")
        if not lock.acquire(LOCK_S):
            raise RunError(f"Another window has been changing a template for {LOCK_S:.0f} s; try again")
        try:
            yield
        finally:
            lock.release()


def _refuse_taken(path: Path, name: str) -> None:
    if path.exists():
        raise RunError(EXISTS.format(name=name))


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """What two templates have differently: `Rank 8, yours 16; Epochs 4, yours 10`."""
    keys = [key for key in form.KEYS if (key in theirs or key in ours) and theirs.get(key) != ours.get(key)]
    named = [f"{LABELS[key]} {_short(theirs.get(key))}, yours {_short(ours.get(key))}" for key in keys[:3]]
    more = [f"{len(keys) - 3} more settings"] if len(keys) > 3 else []
    return "; ".join([*named, *more]) or "it was saved again with the same settings"


def _short(value: object) -> str:
    text = " ".join(str(value).split()) if value not in (None, "") else "empty"
    return text if len(text) <= 40 else f"{text[:39]}…"


def rename(key: object, new_name: object) -> dict[str, Any]:
    """Rename a template. Returns {key, name, version}. RunError: the name is taken, or the template is gone."""
    old, text = _of_key(key), clean_name(new_name)
    new = _path(text)
    with _locked("rename the template"):
        one = _read(old)
        if new != old:
            _refuse_taken(new, text)
        atomic_write(new, json.dumps({**one, "name": text}, indent=1))
        if new != old:
            old.unlink(missing_ok=True)
    return {"key": new.stem, "name": text, "version": one["version"]}


def delete(key: object) -> dict[str, Any]:
    """Delete a template. Returns it, so that the deletion can be undone with `restore`."""
    path, one = _of_key(key), {}
    with _locked("delete the template"):
        with contextlib.suppress(RunError):
            one = _read(path)
        path.unlink(missing_ok=True)
    return one


def restore(one: object) -> dict[str, Any]:
    """Bring a deleted template back: what `delete` returned."""
    if not isinstance(one, dict) or not isinstance(one.get("values"), dict):
        raise RunError("This template cannot be brought back; save it again")
    return save(one.get("name"), one["values"])


def values_of(key: object, current: Mapping[str, Any]) -> dict[str, Any]:
    """The form's values that a template sets, by field.

    Args:
        current: the form's values; the trigger word is filled into prompts.

    Raises:
        RunError: there is no such template.
    """
    built_in = next((one for one in _built_in() if one["key"] == key), None)
    if built_in is None:
        return _existing(_read(_of_key(key))["values"])
    word = " ".join(str(current.get("trigger") or "").split()) or "your trigger word"
    values: dict[str, Any] = dict(built_in["values"])
    if "prompts" in values:
        values["prompts"] = values["prompts"].strip().replace("{trigger}", word)
    return values


def _existing(values: dict[str, Any]) -> dict[str, Any]:
    """The values without choices that no longer exist, such as a base model that was removed from models.toml."""
    known = form.restored(values)
    return {key: known[key] for key in values}
