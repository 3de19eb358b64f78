"""The models that write captions (presets/captioners.toml), and their files: in a folder, in the hub's cache, or downloaded.

guards/download.py downloads: it watches the bytes, checks the disk first and continues a download that was interrupted.
"""

import fnmatch
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import presets
from guards import download
from guards.hub import DownloadError
from runs.files import RunError, explained
from runs.paths import models_dir
from runs.weights import reporter

NEEDED = {"florence": ("config.json", "*.safetensors"), "tagger": ("model.onnx", "selected_tags.csv")}  # patterns


@dataclass(frozen=True)
class Captioner:
    """A row of presets/captioners.toml. files: patterns; size_mb: about what they need."""

    key: str
    engine: str
    name: str
    note: str
    repo: str
    licence: str
    files: tuple[str, ...]
    size_mb: int
    gpu_gb: float


@functools.cache
def captioners() -> dict[str, Captioner]:
    """All models by key, in the order of the table."""
    rows = presets.read_table("captioners.toml").items()
    return {key: Captioner(key, **{**row, "files": tuple(row["files"])}) for key, row in rows}


def of_engine(engine: str) -> list[Captioner]:
    """The models of an engine; the first is the default."""
    return [one for one in captioners().values() if one.engine == engine]


def find(engine: str, model: str) -> Captioner | Path:
    """The model that a name means: a key of the table, "" for the default, or a folder with a model's files. Raises
    RunError: it is neither, or the folder lacks a file."""
    rows = of_engine(engine)
    if not model:
        return rows[0]
    if row := next((one for one in rows if one.key == model), None):
        return row
    folder = Path(os.path.expanduser(model))
    if not os.path.isdir(folder):  # Path's own two raise errors for text that no path can be
        keys = ", ".join(one.key for one in rows)
        raise RunError(f"There is no model {model[:200]!r}; use one of {keys}, or the folder of a model")
    if lacking := _lacking(engine, folder):
        raise RunError(f"{folder} has no {lacking[0]}; name a folder with all files of the model")
    return folder


def _lacking(engine: str, folder: Path) -> list[str]:
    return [one for one in NEEDED[engine] if not any(path.is_file() for path in folder.glob(one))]


def present(row: Captioner) -> Path | None:
    """The folder with a model's files; None when they must be downloaded. `models/KEY` comes before the hub's cache."""
    found = models_dir() / row.key, download.cached_repository(row.repo)
    for folder in found:
        if folder is not None and not _lacking(row.engine, folder):
            return folder
    return None


def fetch(row: Captioner, on_line: Callable[[str], None]) -> Path:
    """The folder of a model, downloaded when its files are missing. on_line: called with what the download does. Raises
    RunError: offline, no space, stalled or refused. Received bytes are kept."""
    if (folder := present(row)) is not None:
        return folder

    def chosen(names: list[str]) -> list[str]:
        found = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in row.files)]
        missing = [pattern for pattern in NEEDED[row.engine] if not fnmatch.filter(found, pattern)]
        if missing:
            raise DownloadError("missing", f"{row.repo} has no {' and no '.join(missing)}")
        return found

    try:
        with explained(f"download {row.name}"):
            return download.snapshot(
                row.repo, chosen, reporter(lambda line: on_line(f"Downloading {row.name}, {line}"))
            )
    except DownloadError as error:
        by_hand = f"put the files of {row.repo} into {models_dir() / row.key}"
        raise RunError(f"{row.name} was not downloaded: {error.or_by_hand(by_hand)}") from error
