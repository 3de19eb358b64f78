"""The files of base models: checked before a run starts, and downloaded for kohya's trainers into the models folder.

A trainer notices a missing file only after minutes. The checks read only names, sizes and the headers of files. They
contact the hub only with `ask`, once, and with a time limit; a model in the local cache needs no network.
guards/download.py does a download; this module says where a file comes from and where it belongs.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import presets
from guards import download, hub
from guards.deadline import call
from presets.tables import downloads, shards
from runs.command import model_files
from runs.files import RunError, explained
from runs.machine import free_gb
from runs.paths import ROOT, models_dir

if TYPE_CHECKING:
    from runs.spec import RunSpec

Progress = Callable[[hub.Progress], None]
HUB_TIMEOUT_S = 8.0  # for a response of the hub, name resolution included
POINTER = b"version https://git-lfs"
FOLDERS = ("pretrained_model_name_or_path", "qwen3")  # sd-scripts also reads these as a folder in the hub's layout
OPTIONAL = "base_weights"  # of the files that a trainer needs: only some models of a family have it


def problems(spec: "RunSpec", ask: bool = False) -> list[str]:
    """The files of the base model that are missing or unusable, each as a sentence with what to do.

    Args:
        ask: also ask the hub about a model that is not on this machine; takes up to HUB_TIMEOUT_S seconds.
    """
    model = presets.models()[spec.model]
    files = model_files(spec)
    needs = files if spec.backend == "diffusers" else presets.trainer_of(spec.model, spec.backend)["needs"]
    if lacking := [flag for flag in needs if flag != OPTIONAL and not (files.get(flag) or spec.extra.get(flag))]:
        options = " ".join(f"{flag}=PATH" for flag in lacking)
        keys = "repo" if spec.backend == "diffusers" else ", ".join(lacking)
        return [f"{model['name']} has no {keys}; add it in models.toml, or as a trainer option: {options}"]
    if spec.backend == "diffusers":
        return [] if model["generated"] else _diffusers(spec, files["pretrained_model_name_or_path"], ask)
    fetch = "" if model["generated"] else f", or run `python -m runs fetch-model {spec.model}`"
    found, gone = [], []
    for flag, path in _files(spec):
        if not path.is_file():
            gone.append(f"{path} (--{flag})")
        elif fault := file_fault(path):
            fix = f"put an intact copy there, use another file as the trainer option {flag}=PATH{fetch}"
            found.append(f"model file {path} (--{flag}) {fault}; delete it, then {fix}")
    if gone:
        fix = f"put them there, use other files as trainer options FLAG=PATH{fetch}"
        found.insert(0, f"model files missing: {', '.join(gone)}; {fix}")
    return found


def _files(spec: "RunSpec") -> list[tuple[str, Path]]:
    """(flag, path) of each file that a trainer of kohya's loads; a part in several files has several, a folder none."""
    # The script runs in the project folder.
    values = [(flag, ROOT / value) for flag, value in model_files(spec).items()]
    values = [(flag, path) for flag, path in values if flag not in FOLDERS or not path.is_dir()]
    return [(flag, path.with_name(name)) for flag, path in values for name in shards(path.name)]


def file_fault(path: Path) -> str:
    """What is wrong with a file of weights, as the end of a sentence; "" where nothing is found."""
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                return "is a git-lfs pointer instead of the file itself (run `git lfs pull`)"
        if path.suffix == ".safetensors":
            with safe_open(path, framework="np"):  # reads the header, and compares it with the size
                pass
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except SafetensorError as error:
        return f"is not a complete safetensors file ({error})"
    return ""


def _diffusers(spec: "RunSpec", name: str, ask: bool) -> list[str]:
    """The problems of a model in diffusers' layout: a folder or a hub id."""
    folder = ROOT / name
    if folder.is_file():
        return [
            f"model {folder} is a single file, but the built-in trainer reads a folder in diffusers' layout; use such "
            "a folder, or choose kohya's sd-scripts"
        ]
    if folder.is_dir():
        missing = "; ".join(incomplete(spec, folder))
        return [f"the model in {folder} is incomplete ({missing}); download the complete folder again"] * bool(missing)
    if not _is_id(name):
        return [f"model folder missing: {folder}; correct the path, or use a Hugging Face id"]
    return _from_hub(name, presets.models()[spec.model], ask) if from_hub(spec) else []


def _is_id(name: str) -> bool:
    """Whether a model's name is a hub id, and no path."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def incomplete(spec: "RunSpec", folder: Path) -> list[str]:
    """The files of a model folder that are missing or unusable."""
    wrong, files = [], []
    for part, (config, *stem) in presets.families()[presets.models()[spec.model]["family"]]["parts"].items():
        files.append(f"{part}/{config}")
        if stem:
            index = folder / part / f"{stem[0]}.safetensors.index.json"
            names = {f"{stem[0]}.safetensors"}
            if index.is_file():
                try:
                    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
                    wrong.append(f"{part}/{index.name} cannot be read")
                    continue
            files += [f"{part}/{name}" for name in sorted(names)]
    faults = ((name, file_fault(folder / name) if (folder / name).is_file() else "is missing") for name in files)
    return wrong + [f"{name} {fault}" for name, fault in faults if fault]


def _from_hub(repo: str, model: dict, ask: bool) -> list[str]:
    """Why the run could not download a model that is missing or incomplete on this machine."""
    page = hub.page_of(repo)
    by_hand = f"download it elsewhere (hf download {repo}) and use the folder as the trainer option "
    by_hand += "pretrained_model_name_or_path=PATH"
    if hub.offline():
        return [f"{repo} is not on this machine, and HF_HUB_OFFLINE prevents the download; unset it, or {by_hand}"]
    if model["gated"] and model["repo"] == repo and not hub.token():
        licence = f"You must accept its licence on Hugging Face first: open {page}, accept it, then log in under"
        login = "“Hugging Face account” on the page (or run `.venv/bin/hf auth login`, or set HF_TOKEN)"
        return [f"{repo} is not on this machine. {licence} {login}; or {by_hand}"]

    def answer() -> None:
        with hub.ask(f"{hub.endpoint()}/{repo}/resolve/main/model_index.json", 2 * HUB_TIMEOUT_S, "HEAD") as response:
            hub.check_status(response, repo, "model_index.json")

    try:
        if ask:
            call(answer, seconds=HUB_TIMEOUT_S, what="an answer")  # on a thread: a name look-up has no limit
    except hub.DownloadError as error:
        return [f"{repo} is not on this machine: {error.or_by_hand(by_hand)}"]
    except OSError as error:
        why = f"{page} is not available ({error}); check the network, or {by_hand}"
        return [f"{repo} is not on this machine, and {why}"]
    return []


def from_hub(spec: "RunSpec") -> str:
    """The hub id of the model that the run downloads when it starts; "" where nothing has to be downloaded."""
    model = presets.models()[spec.model]
    name = model_files(spec).get("pretrained_model_name_or_path", "")
    local = spec.backend != "diffusers" or model["generated"] or (ROOT / name).exists()
    if local or not _is_id(name):
        return ""
    cached = download.cached_repository(name)
    return "" if cached is not None and not incomplete(spec, cached) else name


def needs_login(spec: "RunSpec") -> str:
    """The hub id of a gated model that the run cannot download because no token is stored; "" otherwise."""
    model, name = presets.models()[spec.model], from_hub(spec)
    return name if name == model["repo"] and model["gated"] and not hub.token() and not hub.offline() else ""


def missing(spec: "RunSpec") -> list[str]:
    """The names of the model's files for sd-scripts that are not on this machine."""
    return [path.name for _, path in _files(spec) if not path.is_file()]


def can_be_fetched(spec: "RunSpec") -> bool:
    """Whether the page offers the next step for a model that is not here: its licence and login, or a download."""
    if spec.backend == "diffusers":
        return bool(needs_login(spec))
    return not presets.models()[spec.model]["generated"] and bool(missing_files(spec.model))


def to_download(spec: "RunSpec") -> tuple[float, Path]:
    """Bytes of the model's files that are not on this machine (as far as known), and the folder that receives them."""
    model = presets.models()[spec.model]
    if model["generated"] or (spec.backend == "diffusers" and not from_hub(spec)):
        return 0.0, models_dir()
    if spec.backend == "diffusers":
        return float(presets.families()[model["family"]]["download_bytes"]), download.cache_folder()
    gone, sources = missing_files(spec.model), downloads()
    return float(sum(sources.get(path.name, {}).get("size", 0) for path in gone)), models_dir()


def note(spec: "RunSpec") -> str:
    """A sentence for a model that the run downloads when it starts, with the free space; "" for any other."""
    name = from_hub(spec)
    if not name or hub.offline():
        return ""
    size, folder = to_download(spec)
    first = f"The run downloads it first ({size / 1e9:.0f} GB; {free_gb(folder):.0f} GB are free)."
    return f"{name} is not on this machine yet. {first}"


# Downloads ------------------------------------------------------------------------------------------------------------


def reporter(say: Callable[[str], object]) -> Progress:
    """What says how far a download is: one line for each file and second."""
    said_s, said_name = 0.0, ""

    def report(at: hub.Progress) -> None:
        nonlocal said_s, said_name
        if time.monotonic() - said_s >= 1 or at.name != said_name or at.done == at.total:
            share = f" · {100 * at.done / at.total:.0f} %" if at.total else ""
            speed = f" · {at.speed / 1e6:.1f} MB/s" if at.speed else ""
            left_s = (at.total - at.done) / at.speed if at.speed else 0.0
            left = f" · {left_s / 60:.0f} min left" if left_s >= 60 else ""
            say(f"{at.name}: {at.done / 1e9:.2f} of {at.total / 1e9:.2f} GB{share}{speed}{left}")
            said_s, said_name = time.monotonic(), at.name

    return report


def missing_files(model: str) -> list[Path]:
    """The files of a base model for kohya's trainers that are missing in the models folder."""
    names = (shard for name in presets.models()[model]["files"].values() for shard in shards(name))
    return [path for path in map(models_dir().joinpath, names) if not path.is_file()]


def fetch_model(model: str, on_progress: Progress = lambda _: None) -> list[Path]:
    """Download the missing model files that kohya's trainers need, when the disk has space for all of them.

    Args:
        model: key or name of a base model. on_progress: called often with the bytes of the current file.

    Returns:
        The downloaded files.

    Raises:
        RunError: offline, no access, not found, no space, stalled or damaged. Received bytes are kept.
    """
    key = presets.find_model(model)
    entry = presets.models()[key]
    if entry["generated"]:
        raise RunError(f"{key} is generated on this machine; there is nothing to download")
    if not entry["files"]:
        raise RunError(f"{key} has no files for kohya's trainers; use the built-in one, which loads {entry['repo']}")
    sources, wanted = downloads(), []
    for path in missing_files(key):
        where = sources.get(path.name)
        if where is None:
            raise RunError(
                f"no download source is known for {path.name}; put the file at {path}, or add it under [downloads] to "
                "models.toml"
            )
        wanted.append((where["repo"], where["path"], path, where.get("sha256", "")))
    fetch(key, wanted, on_progress)
    return [path for *_, path, _ in wanted]


def fetch(what: str, wanted: list[tuple[str, str, Path, str]], on_progress: Progress) -> None:
    """Download files of the hub that all fit onto the disk, each with its SHA-256 ("": the hub's). Raises RunError."""
    known: list[tuple[hub.Remote, Path]] = []
    with explained(f"download {what}"):
        try:
            for repo, file, path, sha256 in wanted:
                files = hub.listing(repo)
                if file not in files:
                    raise hub.missing(repo, file)
                known.append((replace(files[file], digest=sha256.lower() or files[file].digest), path))
            needed = sum(download.missing_bytes(path, remote) for remote, path in known)
            download.check_space(needed, models_dir(), what)
            for remote, path in known:
                download.fetch(remote, path, on_progress)
        except hub.DownloadError as error:
            hint = "; or correct [downloads] in models.toml" if error.kind == "missing" else ""
            raise RunError(f"{error.or_by_hand(f'put {path.name} at {path} yourself')}{hint}") from error
