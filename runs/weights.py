"""Is the base model really there? Looked at before a run is started, because a trainer finds out after minutes.

Nothing is read but names, sizes and the heads of files. The hub is asked only where a start depends on it (`ask`), once,
and with an end: a model in the local cache needs no network.
"""

import functools
import json
import os
import shutil
import threading
import urllib.error
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

import presets
from runs import models
from runs.command import model_files
from runs.files import RunError
from runs.paths import ROOT

if TYPE_CHECKING:
    from runs.spec import RunSpec

ASK_S = 8.0  # for the hub's answer, name resolution included
POINTER = b"version https://git-lfs"
MAX_HEAD = 100_000_000  # bytes; safetensors' own limit


def problems(spec: "RunSpec", ask: bool = False) -> list[str]:
    """What of the base model is missing or cannot be used, each as a sentence with its cure.

    Args:
        ask: ask the hub about a model that is not on this machine; takes at most ASK_S seconds.
    """
    model = presets.models()[spec.model]
    if spec.backend == "diffusers":
        if model["generated"]:
            return []
        return _diffusers(spec, model_files(spec)["pretrained_model_name_or_path"], ask)
    fetch = "" if model["generated"] else f", or run `python -m runs fetch-model {spec.model}`"
    missing, found = {}, []
    for flag, value in model_files(spec).items():
        path = Path(value).expanduser()
        if not path.is_file():
            missing[flag] = path
        elif fault := file_fault(path):
            cure = f"put a whole one there, name another with --set {flag}=PATH{fetch}"
            found.append(f"model file {path} (--{flag}) {fault}; delete it, then {cure}")
    if missing:
        found.insert(0, f"{_missing(missing)}, name others with --set FLAG=PATH{fetch}")
    return found


def _missing(paths: dict[str, Path]) -> str:
    """Which files are missing, by flag, and that they are to be put there; one sentence however many."""
    folders = {path.parent for path in paths.values()}
    one = len(folders) == 1
    names = ", ".join(f"{path.name if one else path} (--{flag})" for flag, path in paths.items())
    where = f" in {folders.pop()}" if one else ""
    return f"model file{'s' * (len(paths) > 1)} missing{where}: {names}; put {'them' if len(paths) > 1 else 'it'} there"


def file_fault(path: Path) -> str:
    """Why a file of weights cannot be what it is called, as the end of a sentence; "" where nothing speaks against it."""
    try:
        stat = path.stat()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return _file_fault(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _file_fault(path: Path, size: int, stamp: int) -> str:
    try:
        with path.open("rb") as file:
            head = file.read(8)
            if head.startswith(POINTER[:8]):
                return "is a git-lfs pointer, not the file itself (git lfs pull)"
            if path.suffix != ".safetensors":
                return ""
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > MAX_HEAD:
                return "is no safetensors file"
            table = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__"]
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "is no safetensors file, or was cut short"
    whole = 8 + length + max(ends, default=0)
    return "" if size == whole else f"was cut short: it has {size} of {whole} bytes"


def _diffusers(spec: "RunSpec", name: str, ask: bool) -> list[str]:
    """Of a folder in diffusers' layout, or of a hub id."""
    folder = ROOT / Path(name).expanduser()  # a relative one is taken from where the script runs
    if folder.is_file():
        return [
            f"model {folder} is a single file, and the built-in trainer reads a folder in diffusers' layout; give one, or "
            "choose kohya's sd-scripts"
        ]
    if folder.is_dir():
        missing = incomplete(spec, folder)
        if not missing:
            return []
        return [f"the model in {folder} is not complete ({'; '.join(missing)}); download the whole folder again"]
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return [f"model folder missing: {folder}; correct the path, or name a Hugging Face id"]
    cached = snapshot(name)
    if cached is not None and not incomplete(spec, cached):
        return []
    return _from_hub(name, presets.models()[spec.model], ask)


def incomplete(spec: "RunSpec", folder: Path) -> list[str]:
    """The files of a model folder that are missing or cannot be used."""
    wrong = []
    for part, (config, *stem) in presets.families()[presets.models()[spec.model]["family"]]["parts"].items():
        place = folder / part
        if not (place / config).is_file():
            wrong.append(f"{part}/{config} is missing")
        elif stem:
            wrong += [f"{part}/{fault}" for fault in _weight_faults(place, stem[0])]
    return wrong


def _weight_faults(place: Path, stem: str) -> list[str]:
    """What is wrong with a part's weights: one file, or several that an index names."""
    index = place / f"{stem}.safetensors.index.json"
    names = [f"{stem}.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return [f"{index.name} cannot be read"]
    faults = ((name, file_fault(place / name) if (place / name).is_file() else "is missing") for name in names)
    return [f"{name} {fault}" for name, fault in faults if fault]


def hub_cache() -> Path:
    """Where models of the hub are kept."""
    return Path(os.environ.get("HF_HUB_CACHE") or models.hub_home() / "hub").expanduser()


def snapshot(repo: str) -> Path | None:
    """Where the hub's own library keeps a model that has been fetched; None when it has not."""
    cache = hub_cache() / f"models--{repo.replace('/', '--')}"
    try:
        commit = (cache / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    folder = cache / "snapshots" / commit
    return folder if folder.is_dir() else None


def _from_hub(repo: str, model: dict, ask: bool) -> list[str]:
    """Why a model that is not (wholly) on this machine cannot be fetched when the run starts."""
    page = f"{models.endpoint()}/{repo}"
    by_hand = (
        f"fetch it elsewhere (hf download {repo}) and name the folder with --set pretrained_model_name_or_path=PATH"
    )
    if models.offline():
        return [
            f"{repo} is not on this machine, and HF_HUB_OFFLINE keeps it from being fetched; unset it, or {by_hand}"
        ]
    if model["gated"] and model["repo"] == repo and not models.token():
        return [
            f"{repo} is not on this machine, and its makers give it to those who accept its licence: open {page}, accept, then "
            f"run `hf auth login` (or set HF_TOKEN); or {by_hand}"
        ]
    if not ask:
        return []
    status, reason = _asked(f"{page}/resolve/main/model_index.json")
    if status in (401, 403):
        return [
            f"{repo} is not on this machine, and the hub does not give it to you ({status}): accept its licence at {page} with the "
            f"account of your token (`hf auth whoami`), or {by_hand}"
        ]
    if status in (404, 410):
        return [
            f"{repo} is neither a folder here nor a model in diffusers' layout on the hub ({page}); correct the name in models.toml"
        ]
    if status == 0 or status >= 400:
        return [
            f"{repo} is not on this machine, and {page} does not answer ({reason}); check the network, or {by_hand}"
        ]
    return []


def _asked(url: str) -> tuple[int, str]:
    """(HTTP status, reason) of a file on the hub; status 0 when there is no answer in time."""
    found = [(0, f"nothing within {ASK_S:.0f} s")]

    def ask() -> None:
        try:
            answers = models.follow(url, {}, "HEAD")
            answers[-1].close()
            found[:] = [(answers[-1].status, f"it answers {answers[-1].status}")]
        except (urllib.error.URLError, HTTPException, OSError, RunError) as error:
            found[:] = [(0, str(getattr(error, "reason", None) or error))]

    # A thread of its own, because looking a name up cannot be given an end; one that is stuck holds nothing up.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ASK_S)
    return found[0]


def note(spec: "RunSpec") -> str:
    """A sentence where the model will have to be fetched when the run starts, and whether there may be room; else ""."""
    model = presets.models()[spec.model]
    name = model_files(spec).get("pretrained_model_name_or_path", "")
    if (
        spec.backend != "diffusers"
        or model["generated"]
        or (ROOT / Path(name).expanduser()).exists()
        or models.offline()
    ):
        return ""
    cached = snapshot(name)
    if cached is not None and not incomplete(spec, cached):
        return ""
    free = shutil.disk_usage(next(p for p in (hub_cache(), *hub_cache().absolute().parents) if p.exists())).free
    return (
        f"{name} is not on this machine yet; the run begins by fetching it (tens of GB; {free / 1e9:.0f} GB are free)."
    )
