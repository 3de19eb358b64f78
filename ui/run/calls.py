"""The frame of a call from a run's scripts: the values come from a browser, so each is checked, and an error is a sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import runs
from runs.files import RunError
from ui.dataset.images import OUT_OF_DATE


def answer(action: Callable[[Path, dict[str, Any]], dict[str, Any]], data: object) -> dict[str, Any]:
    """{"ok": True, …} with what the action returns for the run that `data` names, or {"ok": False, "error"}."""
    try:
        if not isinstance(data, dict):
            raise RunError(OUT_OF_DATE)
        return {"ok": True, **action(folder_of(data.get("run")), data)}
    except RunError as error:
        return {"ok": False, "error": str(error)}


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


def number_in(data: dict[str, Any], key: str, low: float, high: float) -> float | None:
    """A number from low to high that the browser sent, or None. RunError: anything else."""
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RunError(OUT_OF_DATE)
    return float(value)
