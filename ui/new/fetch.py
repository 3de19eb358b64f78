"""Download a base model's files from the page: `python -m runs fetch-model` as a separate process.

The process outlives the page and its console. Its output goes to a file in the models folder, its file locks show whether it is running,
and partial downloads are kept, so a later page or a second click continues the download.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import presets
import runs
from monitor.process.platform import detached
from runs.files import explained
from ui.html import esc

_started: dict[str, "subprocess.Popen[bytes]"] = {}  # by model: a new process takes its lock a moment after it starts


def model_to_fetch(values: Mapping[str, Any]) -> str:
    """Key of the chosen model when its files must be downloaded first; "" when nothing is missing."""
    model, trainer = presets.models().get(values["model"]), presets.backends().get(values["backend"])
    if model is None or model["generated"] or trainer is None or trainer["loads"] != "files" or not model["files"]:
        return ""
    return values["model"] if runs.missing_files(values["model"]) else ""


def start(key: str) -> None:
    """Start or continue the download.

    Raises:
        RunError: the models folder cannot be written.
    """
    if running(key):
        return
    with explained("download the model's files"):
        runs.models_dir().mkdir(parents=True, exist_ok=True)
        with _log(key).open("wb") as log:
            _started[key] = subprocess.Popen(
                [sys.executable, "-m", "runs", "fetch-model", key],
                cwd=runs.ROOT,
                env={**os.environ, "PYTHONUTF8": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                **detached(),
            )


def running(key: str) -> bool:
    """Whether a process is downloading a file of this model."""
    from filelock import FileLock, Timeout

    if key in _started and _started[key].poll() is None:
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


def progress_html(key: str) -> str:
    """Progress of the download, or the reason it failed, as HTML; "" when none was started."""
    try:
        lines = _log(key).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    last = lines[-1].removeprefix("runs: ") if lines else "contacting the server…"
    if running(key):
        return f'<p class="hp-hint" role="status" data-testid="fetching">Downloading: {esc(last)}</p>'
    if not runs.missing_files(key):
        return ""
    return f'<p class="hp-hint" role="alert" data-testid="fetch-error"><span class="hp-warn">{esc(last)}</span></p>'


def _log(key: str) -> Path:
    return runs.models_dir() / f".fetch-{runs.slug(key)}.log"
