"""Reads the tables: tiers, trainers, families, models (built-in and the user's), defaults.

A family is one file, `families/NAME.toml`: what trains it, its flags by VRAM tier, its models and their files. Nothing
else in the project names a family. Tables are read once, and are the same objects for all: a caller changes a copy.
The user's `models.toml` is read again when it changes, because the page stays open while it is edited.
"""

import difflib
import functools
import os
import re
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parent.parent
START = r".\start.bat" if os.name == "nt" else "./start.sh"  # as messages name it
FAMILIES = Path(__file__).with_name("families")
MODEL: dict[str, Any] = {
    "name": "",
    "note": "",
    "family": "",
    "repo": "",
    "licence": "unknown",
    "gated": False,
    "generated": False,
    "control": False,
    "backends": [],
    "files": {},
    "flags": {},
    "settings": {},
    "shape": {},
}
"""The keys of a model, with what a model has that does not say it; a value has the same type."""
SOURCE = {"repo": str, "path": str, "size": int, "sha256": str}  # of a download
FAMILY: dict[str, Any] = {"settings": {}, "sample": {}, "files": {}, "text_encoders": 0, "download_bytes": 0}
FIGURES = ("needs_gb", "weights_gb", "note", "basis")  # of a tier, beside its flags
BITS = {"nf4": "4 bits", "int8": "8 bits (int8)"}
OPTIMIZERS = {"adamw8bit": "8-bit AdamW", "adafactor": "Adafactor"}
GENERATED_GB = 1.0  # of a model that is generated for tests
NOTE = "actual use differs by 1–2 GB with the driver and other programs on the GPU"
SHARD = re.compile(r"(?P<stem>.*)-00001-of-(?P<count>\d{5})\.safetensors")


class PresetError(ValueError):
    """A table is invalid. The message says what is wrong, in which file, and what to do."""


def data_root() -> Path:
    """The folder that holds outputs, datasets and models: `$HANGPROOF_DATA`, else the project's own folder."""
    given = os.environ.get("HANGPROOF_DATA")
    return Path(os.path.expanduser(given)).absolute() if given else ROOT


def read_toml(path: Path) -> dict:
    """A TOML file as a dict.

    Raises:
        PresetError: the file is not valid TOML or not UTF-8; the message names it.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise PresetError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PresetError(f"{path}: not valid TOML: {error}; fix this line") from error


@functools.cache
def read_table(name: str) -> dict:
    """A file of presets/, such as `lint.toml`, read once."""
    return read_toml(Path(__file__).with_name(name))


@functools.cache
def _family_files() -> dict[str, dict]:
    """The families' files by name: the default model's family first, then by display name."""
    found = {path.stem: read_toml(path) for path in FAMILIES.glob("*.toml")}
    first = defaults()["run"]["model"]
    return dict(sorted(found.items(), key=lambda item: (first not in item[1]["models"], item[1]["name"])))


def tiers() -> dict[str, dict]:
    """Tiers by name, the smallest first: {label, vram_gb, note}. `tiers_of` says what one is for a model."""
    return read_table("tiers.toml")["tiers"]


def defaults() -> dict:
    """The defaults table."""
    return read_table("defaults.toml")


def backends() -> dict[str, dict]:
    """Trainers by name: {label, loads, flags}."""
    return defaults()["backends"]


@functools.cache
def families() -> dict[str, dict]:
    """Model families by name, as in families/NAME.toml: {name, backends, settings, sample, speed, parts, …}.

    backends: by trainer {script, network_module, needs, memory, flags, cache, tiers, …}. parts: the model in
    diffusers' layout, folder: [its configuration file, prefix of its weight files].
    """
    return {name: _family(table) for name, table in _family_files().items()}


def _family(table: dict) -> dict:
    """A family with every key: {name, settings, sample, speed, files, parts, backends, …}."""
    family = {**FAMILY, **{key: value for key, value in table.items() if key not in ("models", "downloads")}}
    numbers = ["", *(f"_{number}" for number in range(2, family["text_encoders"] + 1))]
    network = ["config.json", "diffusion_pytorch_model"]
    family["parts"] = {
        **{family.get("network", "transformer"): network, "vae": network},
        **{f"text_encoder{number}": ["config.json", "model"] for number in numbers},
        **{f"tokenizer{number}": ["tokenizer_config.json"] for number in numbers},
        "scheduler": ["scheduler_config.json"],
    }
    pixels = family["settings"].get("resolution", defaults()["run"]["resolution"])
    own = {name: {**table["backends"].get(given.get("like"), {}), **given} for name, given in table["backends"].items()}
    return {**family, "backends": {name: _trainer(name, given, pixels) for name, given in own.items()}}


def _trainer(name: str, given: dict, pixels: int) -> dict:
    """A trainer's table of a family with every key, its sets of flags written out, and the commands for its caches."""
    full = {**defaults()["trainer"], **backends()[name].get("usual", {}), **given}
    full |= {key: _in_full(full[key]) for key in ("memory", "flags")}
    given, row, full["tiers"] = full["tiers"], None, {}
    for tier in tiers():  # a tier without a row takes that of the next smaller one, None where there is none
        row = full["tiers"][tier] = _tier(given[tier], full, pixels) if tier in given else row
    start = full["script"].removesuffix("train_network.py")
    captions = {"batch_size": 1, **full.get("cache_text_flags", {})}
    texts = ("cache_text", "text_encoder_outputs", "the captions", captions)
    full["cache"] = [
        {"script": f"{start}cache_{what}.py", "phase": phase, "takes": full[key], "flags": flags}
        for key, what, phase, flags in (("cache_latents", "latents", "the images", {}), texts)
        if key in full
    ]
    return full


def _tier(row: dict, trainer: dict, pixels: int) -> dict:
    """A tier: {flags, note, needs_gb, training_gb, weights_gb, basis}; its flags and figures make the texts."""
    flags = _in_full({key: value for key, value in row.items() if key not in FIGURES})
    flags.setdefault("optimizer_type", "adamw8bit")
    every, text_gb = {**trainer["memory"], **flags}, trainer["text_gb"]
    fp8 = any(flag in every for flag in ("fp8_base", "fp8_scaled"))
    bits = BITS.get(every.get("quantize", ""), "8 bits" if fp8 else "16 bits")
    blocks = f"of its {trainer['blocks']} blocks" if "blocks" in trainer else "of its blocks"
    how = f"{OPTIMIZERS.get(every['optimizer_type'], every['optimizer_type'])} optimizer"
    if count := every.get("blocks_to_stream"):
        how = f"{count} {blocks} copied to the GPU for each use"
    elif count := every.get("blocks_to_swap"):
        ram = f" ({trainer['ram_gb']} GB needed)" if "ram_gb" in trainer else ""
        how = f"{count} {blocks} swapped to main memory{ram}: slower, and every wait for a block has a time limit"
    note = f"Model in {bits}, {how}" + "; texts are encoded on the processor" * ("text_encoder_cpu" in every)
    basis = f"estimated: its text encoders take {text_gb:g} GB while captions are encoded"
    if "weights_gb" in row:
        where = "on the GPU" if "blocks_to_swap" in every else f"in {bits}"
        basis = f"estimated: {row['weights_gb']:g} GB of weights {where}, {trainer['activations_gb']:g} GB "
        basis += f"for an image of {pixels} pixels, the LoRA and its optimizer"
    return {
        "flags": flags,
        "note": row.get("note", note),
        "needs_gb": max(text_gb, row["needs_gb"]),
        "training_gb": row["needs_gb"],
        "weights_gb": row.get("weights_gb", 0.0),
        "basis": row.get("basis", basis),
    }


def _in_full(flags: dict) -> dict:
    """Flags with those that a name of a set stands for (defaults.toml), in its place."""
    sets = defaults()["flag_sets"]
    return {name: item for flag, value in flags.items() for name, item in sets.get(flag, {flag: value}).items()}


def models() -> dict[str, dict]:
    """Base models by key, with every optional key: the built-in ones, then the user's (`<data root>/models.toml`).

    `settings` are those of the family and of the model.

    Raises:
        PresetError: the user's file is not valid TOML, or a model in it lacks a key or has an unknown one.
    """
    path = data_root() / "models.toml"
    return _models(path, _stamp(path))


def _stamp(path: Path) -> tuple[int, int] | None:
    """What tells that a file was changed; None without the file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size


@functools.lru_cache(maxsize=4)
def _models(path: Path, stamp: tuple[int, int] | None) -> dict[str, dict]:
    """As `models`, of a file as it was at `stamp`; None without the file."""
    table = {
        key: ({"family": family, **model}, f"presets/families/{family}.toml")
        for family, file in _family_files().items()
        for key, model in file["models"].items()
    }
    table |= {key: (model, str(path)) for key, model in _own(path, stamp, "models").items()}
    return {key: _complete(key, model, origin) for key, (model, origin) in table.items()}


@functools.lru_cache(maxsize=8)
def _own(path: Path, stamp: tuple[int, int] | None, name: str) -> dict[str, Any]:
    """The table `name` of the user's file as it was at `stamp`; {} without one. PresetError: it cannot be read."""
    try:
        found = read_toml(path).get(name, {}) if stamp else {}
    except OSError as error:
        raise PresetError(f"{path}: cannot be read: {error.strerror}; it has your own base models") from error
    if not isinstance(found, dict):
        raise PresetError(f"{path}: {name} is not a table; write it like those in presets/families/flux.toml")
    for key, row in found.items() if name == "downloads" else ():
        given = row if isinstance(row, dict) else {}
        if "repo" not in given or not all(isinstance(given.get(k, kind()), kind) for k, kind in SOURCE.items()):
            source = '{ repo = "OWNER/NAME" }; optional: path, size in bytes, sha256'
            raise PresetError(f'{path}: [downloads]: write "{key}" = {source}')
    return found


def downloads() -> dict[str, dict]:
    """Sources of model files by name in the models folder: {repo, path[, size, sha256]}; the name is the usual path.

    Of a model in several files (`NAME-00001-of-00004.safetensors`) the table has the first; the others follow from it.
    PresetError: the user's table is invalid.
    """
    own, out = data_root() / "models.toml", dict[str, dict]()
    built_in = (file.get("downloads", {}) for file in _family_files().values())
    for table in (*built_in, _own(own, _stamp(own), "downloads")):
        for name, source in table.items():
            names, path = shards(name), source.get("path", name)
            paths = shards(path + name if path.endswith("/") else path)
            size = {"size": source["size"] // len(names)} if "size" in source else {}
            out |= {one: {**source, "path": at, **size} for one, at in zip(names, paths, strict=False)}
    return out


def shards(name: str) -> list[str]:
    """The files that a file name stands for: itself, or all N of a name that ends in -00001-of-0000N.safetensors."""
    match = SHARD.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _complete(key: str, model: dict, origin: str) -> dict:
    where = f"{origin}: [models.{key}]"
    if not isinstance(model, dict):
        raise PresetError(f"{where} is not a table; write it like the models in presets/families/flux.toml")
    for name, value in model.items():
        if name not in MODEL:
            raise PresetError(f"{where}: unknown key {name!r}; use one of {', '.join(MODEL)}")
        if not isinstance(value, type(MODEL[name])):
            raise PresetError(f"{where}: {name} must be a {type(MODEL[name]).__name__}, not {value!r}")
    known = families()
    full = {**MODEL, "name": key, "family": next(iter(known)), **model}
    family = known.get(full["family"])
    if family is None:
        raise PresetError(f"{where}: unknown family {model['family']!r}; use one of {', '.join(known)}")
    loads = {name: trainer["loads"] for name, trainer in backends().items()}
    if "backends" not in model:
        full["backends"] = [name for name in loads if name in family["backends"] and full[loads[name]]]
    if full["files"]:
        needs = [flag for trainer in family["backends"].values() for flag in trainer["needs"]]
        files = {**family["files"], **full["files"]}
        full["files"] = {flag: files[flag] for flag in (*filter(files.get, needs), *files)}
    full["settings"] = {**family["settings"], **full["settings"]}
    for table, name, value in ((one, *row) for one in ("files", "shape", "settings") for row in full[one].items()):
        kind = "" if table == "files" else 0.0 if table == "shape" else defaults()["run"].get(name, value)
        if not isinstance(value, int | float if isinstance(kind, float) else type(kind)):
            wanted = "text" if isinstance(kind, str) else "a number"
            raise PresetError(f"{where}: {table}: {name} must be {wanted}, not {value!r}")
    if not full["backends"] or any(name not in [*loads] for name in full["backends"]):
        advice = "set `repo` for diffusers or `files` for sd-scripts"
        raise PresetError(f"{where}: no trainer can load it (backends = {full['backends']}); {advice}")
    if untrained := [name for name in full["backends"] if name not in family["backends"]]:
        able = ", ".join(family["backends"])
        raise PresetError(f"{where}: {untrained[0]} cannot train the family {full['family']}; use backends from {able}")
    return full


def backends_of(model: str) -> list[str]:
    """The trainers that can train a model, the preferred one first. Raises PresetError."""
    return list(_model(model)["backends"])


def backend_of(model: str) -> str:
    """The trainer of a run that names none: the default one where it can train the model, else the model's first."""
    able, usual = _model(model)["backends"], defaults()["run"]["backend"]
    return usual if usual in able else able[0]


def trainer_of(model: str, backend: str) -> dict:
    """What a trainer needs to train a model: {script, network_module, needs, memory, flags, cache, tiers, …}.

    Raises:
        PresetError: there is no such model, or the trainer cannot train it.
    """
    entry = _model(model)
    if backend not in entry["backends"]:
        raise PresetError(f"{backend} cannot train {model}; use {' or '.join(entry['backends'])}")
    return families()[entry["family"]]["backends"][backend]


def tiers_of(model: str, backend: str | None = None) -> dict[str, dict]:
    """What each tier is for a model with a trainer (None: the model's usual one), the smallest tier first.

    Returns:
        By tier: {label, vram_gb, note, flags, source, needs_gb, basis, problem}.
        flags: those that the tier adds; source: where they come from. needs_gb: GPU memory with the default settings;
        basis: where the figure comes from. problem: "" or why the tier cannot hold the model and which ones can, as a
        sentence; then flags is empty and needs_gb is None. A model that is generated for tests fits everywhere.

    Raises:
        PresetError: there is no such model, or the trainer cannot train it.
    """
    entry, trainer = _model(model), trainer_of(model, backend or backend_of(model))
    smallest = next(tier for tier, row in trainer["tiers"].items() if row)
    generated = {"needs_gb": GENERATED_GB, "basis": NOTE} if entry["generated"] else {}
    why = f"{entry['name']} does not fit: {trainer['too_small']}; choose {smallest} or more"
    other = {"flags": {}, "note": why, "needs_gb": None, "basis": trainer["too_small"], "problem": why}
    other = trainer["tiers"][smallest] if generated else other
    row = {"source": trainer["source"], "problem": ""}
    return {tier: {**about, **row, **(trainer["tiers"][tier] or other), **generated} for tier, about in tiers().items()}


def tier_flags(model: str, backend: str, tier: str) -> dict[str, Any]:
    """The flags that the VRAM choice sets: those of every tier, then the tier's own; {} where it cannot hold the model.

    Raises:
        PresetError: there is no such model, or the trainer cannot train it.
    """
    row = tiers_of(model, backend)[tier]
    return {} if row["problem"] else {**trainer_of(model, backend)["memory"], **row["flags"]}


def smallest_tier(model: str, backend: str) -> str:
    """The smallest tier that can hold a model. Raises PresetError."""
    return next(tier for tier, row in tiers_of(model, backend).items() if not row["problem"])


def _model(key: str) -> dict:
    found = models()
    return found[key] if key in found else found[find_model(key)]


def find_model(name: str) -> str:
    """The key of the model with this key or display name, ignoring case.

    Raises:
        PresetError: there is no such model; the message lists the known ones.
    """
    table = models()
    wanted = name.strip().casefold()
    for key, model in table.items():
        if wanted in (key.casefold(), model["name"].casefold()):
            return key
    close = difflib.get_close_matches(wanted, [key.casefold() for key in table], n=3)
    guess = f"did you mean {', '.join(close)}?" if close else "list them with `python -m presets list`."
    raise PresetError(f"no base model {name!r}; {guess} You can add your own to models.toml")
