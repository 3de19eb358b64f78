"""Fetching a base model's files from the page: `python -m runs fetch-model` as a process of its own.

It outlives the page as a run does: what it says goes to a file in the models folder, whether it runs is told by the lock
that it holds, and what has come is kept, so that a page which opens later, or a second press, takes it up.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import presets
import runs
from runs.files import explained
from ui.html import esc

_begun: dict[str, subprocess.Popen] = {}  # by model: until a process holds the lock, only this knows of it


def wanted(values: Mapping) -> str:
    """The model whose files are to be fetched before it can be trained: its key, "" where there is nothing to fetch."""
    model = presets.models().get(values["model"])
    if model is None or model["generated"] or values["backend"] != "sd-scripts" or not model["files"]:
        return ""
    return values["model"] if runs.missing_files(values["model"]) else ""


def start(key: str) -> None:
    """Begin to fetch, or go on. Raises RunError: the models folder cannot be written."""
    if running(key):
        return
    with explained("fetch the model's files"):
        runs.models_dir().mkdir(parents=True, exist_ok=True)
        with _log(key).open("wb") as said:
            _begun[key] = subprocess.Popen(
                [sys.executable, "-m", "runs", "fetch-model", key],
                cwd=runs.ROOT,
                env={**os.environ, "PYTHONUTF8": "1"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def running(key: str) -> bool:
    """Whether a process fetches a file of this model now."""
    from filelock import FileLock, Timeout

    if key in _begun and _begun[key].poll() is None:
        return True
    for path in runs.missing_files(key).values():
        lock = path.with_name(f".{path.name}.lock")
        if lock.exists():
            try:
                with FileLock(str(lock), timeout=0):
                    continue
            except Timeout:
                return True
    return False


def told(key: str) -> str:
    """How far it is, or why it ended, as HTML; "" where it was never begun."""
    try:
        lines = _log(key).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    last = lines[-1].removeprefix("runs: ") if lines else "asking for the files…"
    if running(key):
        return f'<p class="hp-hint" role="status" data-testid="fetching">Fetching: {esc(last)}</p>'
    if not runs.missing_files(key):
        return ""
    return f'<p class="hp-hint" role="alert" data-testid="fetch-fault"><span class="hp-warn">{esc(last)}</span></p>'


def _log(key: str) -> Path:
    return runs.models_dir() / f".fetch-{runs.slug(key)}.log"
