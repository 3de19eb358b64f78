"""The files of base models for kohya's trainers: which are missing, and their download into the models folder.

guards/download.py does the download; this module says where a file comes from and where it belongs.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import presets
from guards.download import check_space, missing_bytes
from guards.download import fetch as download_file
from guards.hub import DownloadError, Options, Remote, Source
from guards.hub import Progress as State
from guards.hub_request import resolve
from presets.tables import downloads, shards
from runs.files import RunError, explained
from runs.paths import models_dir

Progress = Callable[[State], None]


def missing_files(model: str) -> dict[str, Path]:
    """The missing files of a base model, by flag; of a part in several files, the second and others as `FLAG 2`."""
    out = {}
    for flag, name in presets.models()[model]["files"].items():
        for number, path in enumerate(all_files(models_dir() / name), 1):
            if not path.is_file():
                out[flag if number == 1 else f"{flag} {number}"] = path
    return out


def all_files(path: Path) -> list[Path]:
    """The files that the path of a model file stands for: itself, or all of `…-00001-of-0000N.safetensors`."""
    return [path.with_name(name) for name in shards(path.name)]


def fetch_model(model: str, on_progress: Progress = lambda _: None, stall_s: float | None = None) -> list[Path]:
    """Download the missing model files that kohya's trainers need, when the disk has space for all of them.

    Args:
        model: key or name of a base model. on_progress: called often with the bytes of the current file.
        stall_s: seconds without progress before the download fails; None: `download_stall_s`.

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
        raise RunError(
            f"{key} has no model files for kohya's trainers; use the diffusers backend, which downloads {entry['repo']} itself"
        )
    sources, wanted = downloads(), []
    for flag, path in missing_files(key).items():
        where = sources.get(path.name)
        if where is None:
            raise RunError(
                f"no download source is known for {path.name} (--{flag}); put the file at {path}, or add it under [downloads] to models.toml"
            )
        wanted.append((Source(where["repo"], where["path"]), path, where.get("sha256", "")))
    known: dict[Path, Remote] = {}
    with _as_run_errors("check the disk space"):
        for source, path, _ in wanted:
            known[path] = resolve(source, _options(path, on_progress, stall_s))
        check_space(sum(missing_bytes(path, known[path].size) for path in known), models_dir(), key)
    for source, path, sha256 in wanted:
        fetch(source.repo, source.file, path, sha256, on_progress, stall_s)
    return [path for _, path, _ in wanted]


def fetch(
    repo: str,
    file: str,
    target: Path,
    sha256: str = "",
    on_progress: Progress = lambda _: None,
    stall_s: float | None = None,
) -> None:
    """Download one file of a hub repository to `target`, continuing an interrupted download. Raises RunError."""
    with _as_run_errors(f"download {target.name}"):
        download_file(Source(repo, file), target, _options(target, on_progress, stall_s), sha256=sha256)


def _options(target: Path, on_progress: Progress, stall_s: float | None) -> Options:
    return Options(on_progress, stall_s=stall_s, by_hand=f"put {target.name} at {target} yourself")


@contextlib.contextmanager
def _as_run_errors(what: str) -> Iterator[None]:
    with explained(what):
        try:
            yield
        except DownloadError as error:
            hint = "; or correct [downloads] in models.toml" if error.kind == "missing" else ""
            raise RunError(f"{error}{hint}") from error
