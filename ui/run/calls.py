"""The run that a browser or a program names."""

from pathlib import Path

import runs
from runs.files import RunError
from ui.dataset.images import OUT_OF_DATE


def folder_of(name: object) -> Path:
    """The folder of the run of this name. RunError: there is none."""
    if not isinstance(name, str):
        raise RunError(OUT_OF_DATE)
    folder = runs.outputs_dir() / name
    try:
        known = folder.parent == runs.outputs_dir() and name[:1] != "." and (folder / "run.toml").is_file()
    except (OSError, ValueError):  # too long, or with a null character
        known = False
    if not known:
        raise RunError(f"There is no run {name[:100]!r}. Reload the page.")
    return folder
