"""Download a base model's files from the page: `python -m runs fetch-model` as a separate process.

It runs in the background (ui/jobs.py), and waits for one that was started in a console. Partial downloads are kept, so a
later page or a second click continues.
"""

from collections.abc import Mapping
from typing import Any

import presets
import runs
from ui import jobs
from ui.html import esc

LIMIT_S = 7 * 24 * 3600.0


def model_to_fetch(values: Mapping[str, Any]) -> str:
    """Key of the chosen model when its files must be downloaded first; "" when nothing is missing."""
    model, trainer = presets.models().get(values["model"]), presets.backends().get(values["backend"])
    if model is None or model["generated"] or trainer is None or trainer["loads"] != "files" or not model["files"]:
        return ""
    return values["model"] if runs.missing_files(values["model"]) else ""


def start(key: str) -> None:
    """Start or continue the download.

    Raises:
        RunError: the models folder cannot be written, or another page has just started it.
    """
    if not running(key):
        jobs.start(runs.models_dir(), _job(key), ["runs", "fetch-model", key], LIMIT_S)


def running(key: str) -> bool:
    """Whether the page is downloading this model's files."""
    return jobs.running(runs.models_dir(), _job(key))


def progress_html(key: str) -> str:
    """Progress of the download, or the reason it failed, as HTML; "" when none was started."""
    if jobs.read(runs.models_dir(), _job(key)) is None:
        return ""
    last = jobs.reason(runs.models_dir(), _job(key), "contacting the server…")  # its progress, while it runs
    if running(key):
        return f'<p class="hp-hint" role="status" data-testid="fetching">Downloading: {esc(last)}</p>'
    if not runs.missing_files(key):
        return ""
    return f'<p class="hp-hint" role="alert" data-testid="fetch-error"><span class="hp-warn">{esc(last)}</span></p>'


def _job(key: str) -> str:
    return f"fetch-{runs.slug(key)}"
