"""Deletes runs, and gives them labels. An interruption leaves no half run.

A deletion first gives the run a hidden name: what an interruption leaves of it is removed by the next deletion.
A run is renamed by a label in a file of its own. Its folder stays, because its script, states and LoRA have that name.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from guards.checkpoint import rename as move
from guards.reading import read_text
from runs import env_file, staging
from runs.files import RunError, atomic_write, explained
from runs.paths import datasets_dir, outputs_dir, run_folder

TRASH = ".trash-"  # then random characters and the run's folder name
LABEL = "label.txt"
MAX_LABEL = 200
Idle = Callable[[Path], AbstractContextManager[bool]]
"""Keeps a monitor from starting for the run of a folder; False when one watches it, or when its training is alive.

The caller passes the monitor's `process.spawned.idle`: it knows who is alive, and this folder does not import it.
"""


@dataclass(frozen=True)
class Usage:
    """What a run takes on the disk, in bytes, and how many images its data set has."""

    run_bytes: int
    images_bytes: int
    images: int


def size_text(size: float) -> str:
    """A file size for people: `2.5 MB`, `1.2 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size >= factor * 0.9995:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.0f} kB"


def usage(name: str | Path) -> Usage:
    """What deleting a run frees.

    Raises:
        RunError: there is no such run, or it is outside the folder of runs.
    """
    from runs.dataset import images_in

    folder = _own_folder(name)
    data = datasets_dir() / folder.name
    return Usage(_size(folder), _size(data), len(images_in(data)) if data.is_dir() else 0)


def _size(folder: Path) -> int:
    """The bytes that deleting a folder frees: not those of files that another run of its sweep has too."""
    total = 0
    for where, _, names in os.walk(folder):  # does not enter links
        for name in names:
            with contextlib.suppress(OSError):
                about = os.lstat(os.path.join(where, name))
                total += about.st_size if about.st_nlink < 2 else 0
    return total


def _own_folder(name: str | Path) -> Path:
    """The folder of a run, directly in the folder of runs and no link."""
    folder = run_folder(name)
    if folder.parent.resolve() != outputs_dir().resolve() or folder.name.startswith("."):
        raise RunError(f"{folder} is not in {outputs_dir()}; delete or rename it by hand")
    return _no_link(outputs_dir() / folder.name)


def _no_link(path: Path) -> Path:
    if path.is_symlink() or (hasattr(path, "is_junction") and path.is_junction()):
        raise RunError(f"{path} is a link to another folder; delete or rename it by hand")
    return path


# Delete ---------------------------------------------------------------------------------------------------------------


def delete(name: str | Path, idle: Idle, images: bool = False) -> int:
    """Delete a run and, with `images`, its data set. Returns the bytes that were freed.

    Raises:
        RunError: the run is alive, is a link, or is outside the folder of runs; or a file cannot be deleted.
    """
    folder = _own_folder(name)
    data = datasets_dir() / folder.name
    images = images and data.is_dir()
    if images:
        _no_link(data)
    trash = f"{TRASH}{secrets.token_hex(4)}-{folder.name}"
    with explained(f"delete {folder.name}"):
        with idle(folder) as free:
            if not free:
                raise RunError(f"{folder.name} runs or is being deleted; stop it: python -m monitor stop {folder.name}")
            freed = _size(folder) + (_size(data) if images else 0)
            move(folder, outputs_dir() / trash, sync=False)  # a sync that fails would leave half a deletion
        try:
            if images:
                move(data, datasets_dir() / trash, sync=False)
        except OSError:  # a mount, or on Windows an image that a program has open
            move(outputs_dir() / trash, folder, sync=False)
            raise
        env_file.forget(folder)
        staging.sweep()
        for parent in (outputs_dir(), datasets_dir()):
            _remove(parent / trash)
            for left in parent.glob(f"{TRASH}*"):  # of a deletion that was interrupted
                with contextlib.suppress(OSError):  # tried again by the next one
                    _remove(left)
    return freed


def _remove(trash: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process removes it too
        shutil.rmtree(trash)


# Rename ---------------------------------------------------------------------------------------------------------------


def rename(name: str | Path, label: str) -> None:
    """Give a run another label: the name that people see. Its folder and its files, the LoRA too, keep theirs.

    Raises:
        RunError: the label is empty or too long, or the run is outside the folder of runs.
    """
    folder, label = _own_folder(name), _one_line(label)
    if not label or len(label) > MAX_LABEL:
        raise RunError(f"The label must have 1 to {MAX_LABEL} characters")
    with explained(f"rename {folder.name}"):
        atomic_write(folder / LABEL, f"{label}\n")


def label_of(folder: Path) -> str:
    """The label of a run; "" where it has none."""
    return _one_line(read_text(folder / LABEL))[:MAX_LABEL]


def _one_line(text: str) -> str:
    return " ".join(re.sub(r"[\x00-\x1f\x7f]", " ", text).split())
