"""Reads the tables: tiers, models (built-in and the user's), families, defaults.

Tables are read once and returned as copies, so that no caller can change another's. The user's `models.toml` is read again
when it changes, because the page stays open while it is edited.
"""

import copy
import functools
import os
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
MODEL_KEYS = {
    "name": str,
    "note": str,
    "family": str,
    "repo": str,
    "licence": str,
    "gated": bool,
    "generated": bool,
    "backends": list,
    "files": dict,
    "settings": dict,
    "shape": dict,
}
BACKENDS = ("sd-scripts", "diffusers")


class PresetError(ValueError):
    """A table is invalid. The message says what is wrong, in which file, and what to do."""


def data_root() -> Path:
    """The folder that holds outputs, datasets and models: `$HANGPROOF_DATA`, else the project's own folder."""
    given = os.environ.get("HANGPROOF_DATA")
    return Path(given).expanduser().absolute() if given else ROOT


def read_toml(path: Path) -> dict:
    """A TOML file as a dict.

    Raises:
        PresetError: the file is not valid TOML or not UTF-8; the message names it.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise PresetError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise PresetError(f"{path}: not valid TOML: {error}; fix this line") from error


@functools.cache
def _table(name: str) -> dict:
    return read_toml(Path(__file__).with_name(name))


@functools.lru_cache(maxsize=4)
def _user_table(path: Path, stamp: tuple[int, int]) -> dict:
    return read_toml(path)


def tiers() -> dict[str, dict]:
    """Tiers by name: {label, vram_gb, note, flags}. `defaults()["all"]` has the flags that all tiers share."""
    return copy.deepcopy(_table("tiers.toml")["tiers"])


def defaults() -> dict:
    """The defaults table, with `all`: the flags of every tier."""
    return {**copy.deepcopy(_table("defaults.toml")), "all": copy.deepcopy(_table("tiers.toml")["all"])}


def sanity() -> dict:
    """The tables of values that make no sense: {rule, flag, rates, flags}."""
    return copy.deepcopy(_table("sanity.toml"))


def families() -> dict[str, dict]:
    """Model families by name: {script, network_module, needs, parts, shape}."""
    return copy.deepcopy(_table("models.toml")["families"])


def _user_models(user_file: Path) -> dict:
    try:
        stat = user_file.stat()
    except FileNotFoundError:
        return {}
    return _user_table(user_file, (stat.st_mtime_ns, stat.st_size))


def models(user_file: Path | None = None) -> dict[str, dict]:
    """Base models by key, with every optional key: the built-in ones, then the user's (`<data root>/models.toml`).

    Raises:
        PresetError: the user's file is not valid TOML, or a model in it lacks a key or has an unknown one.
    """
    path = user_file or data_root() / "models.toml"
    user = _user_models(path)
    table = {
        **{key: (model, "presets/models.toml") for key, model in _table("models.toml")["models"].items()},
        **{key: (model, str(path)) for key, model in user.get("models", {}).items()},
    }
    return {key: _complete(key, model, origin) for key, (model, origin) in table.items()}


def downloads(user_file: Path | None = None) -> dict[str, dict]:
    """Sources of model files by file name in the models folder: {repo, path[, size, sha256]}."""
    user = _user_models(user_file or data_root() / "models.toml")
    return copy.deepcopy({**_table("models.toml")["downloads"], **user.get("downloads", {})})


def _complete(key: str, model: dict, origin: str) -> dict:
    where = f"{origin}: [models.{key}]"
    if not isinstance(model, dict):
        raise PresetError(f"{where} is not a table; write it like the models in presets/models.toml")
    for name, value in model.items():
        if name not in MODEL_KEYS:
            raise PresetError(f"{where}: unknown key {name!r}; use one of {', '.join(MODEL_KEYS)}")
        if not isinstance(value, MODEL_KEYS[name]):
            raise PresetError(f"{where}: {name} must be a {MODEL_KEYS[name].__name__}, not {value!r}")
    full = {
        "name": key,
        "note": "",
        "family": "flux",
        "repo": "",
        "licence": "unknown",
        "gated": False,
        "generated": False,
        "backends": [b for b in BACKENDS if model.get({"sd-scripts": "files", "diffusers": "repo"}[b])],
        "files": {},
        "settings": {},
        "shape": {},
        **copy.deepcopy(model),
    }
    if full["family"] not in _table("models.toml")["families"]:
        raise PresetError(f"{where}: unknown family {full['family']!r}; use one of {', '.join(families())}")
    unknown = [b for b in full["backends"] if b not in BACKENDS]
    if unknown or not full["backends"]:
        raise PresetError(
            f"{where}: no trainer can load it (backends = {full['backends']}); set `repo` for diffusers or `files` for sd-scripts"
        )
    return full


def find_model(name: str, user_file: Path | None = None) -> str:
    """The key of the model with this key or display name, ignoring case.

    Raises:
        PresetError: there is no such model; the message lists the known ones.
    """
    table = models(user_file)
    wanted = name.strip().casefold()
    for key, model in table.items():
        if wanted in (key.casefold(), model["name"].casefold()):
            return key
    raise PresetError(f"no base model {name!r}; use one of {', '.join(table)}, or add yours to models.toml")
