"""The files of base models for kohya's trainers: which are missing, and their download into the models folder.

guards/download.py does the download; this module says where a file comes from and where it belongs.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import presets
from guards.download import check_space, missing_bytes
from guards.download import fetch as download_file
from guards.hub import DownloadError, Options, Remote, Source
from guards.hub import Progress as State
from guards.hub_request import listing, missing
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
    download(key, wanted, on_progress)
    return [path for _, path, _ in wanted]


def download(
    what: str, wanted: list[tuple[Source, Path, str]], on_progress: Progress, stall_s: float | None = None
) -> None:
    """Download files of the hub that all fit onto the disk, each with its SHA-256 ("": the hub's). Raises RunError.

    Args:
        stall_s: seconds without progress before the download fails; None: `download_stall_s`.
    """
    known: list[tuple[Source, Path, Remote, Options]] = []
    with _as_run_errors(f"download {what}"):
        for source, path, sha256 in wanted:
            options = Options(on_progress, stall_s=stall_s, by_hand=f"put {path.name} at {path} yourself")
            commit, files = listing(source, options)
            if source.file not in files:
                raise missing(f"{source.file} of {source.repo}", source, options)
            remote = files[source.file]
            exact = replace(remote, digest=sha256.lower() or remote.digest)
            known.append((replace(source, revision=commit), path, exact, options))
        check_space(sum(missing_bytes(path, remote) for _, path, remote, _ in known), models_dir(), what)
        for source, path, remote, options in known:
            download_file(source, path, remote, options)


@contextlib.contextmanager
def _as_run_errors(what: str) -> Iterator[None]:
    with explained(what):
        try:
            yield
        except DownloadError as error:
            hint = "; or correct [downloads] in models.toml" if error.kind == "missing" else ""
            raise RunError(f"{error}{hint}") from error
