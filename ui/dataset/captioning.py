"""Captions written by a model: starts `python -m ui.dataset.caption_work`, and says how far it is.

The job is a process of its own (ui/jobs.py) that stores each caption in the draft (ui/dataset/caption_work.py). So it
goes on when the server or the browser ends, and what it wrote is there when the page is opened again.
"""

import importlib.util
import re
from collections.abc import Callable, Iterable
from typing import Any

from captions import endpoint, models
from captions.options import checked
from runs.files import RunError
from ui import jobs
from ui.dataset import caption_work, draft

JOB = "captions"
LIMIT_S = 14 * 24 * 3600.0
MOST_FAILURES = 20
LINE = re.compile(r"[^\x00-\x1f\x7f]{0,500}")
PROMPT = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f]{0,4000}")
TEXTS = ("engine", "model", "device", "task", "without", "url", "prompt", "key_variable", "prefix", "suffix", "trigger")
PLACEHOLDER = "http://127.0.0.1:11434/v1"


def start(
    draft_id: str,
    options: dict[str, Any],
    which: str = "empty",
    only: Iterable[str] | None = None,
    overwrite: bool = False,
) -> int:
    """Start to write captions in the background. Returns the number of images.

    Args: as caption_work.begin.

    Raises:
        RunError: an option is not valid, there is nothing to do, or a job runs already.
    """
    if which not in caption_work.WHICH:
        raise RunError(draft.OUT_OF_DATE)
    _check(checked(options))
    if running(draft_id):
        raise RunError("Captions are being written already; cancel that first")
    number: list[int] = []
    _run(draft_id, lambda: number.append(caption_work.begin(draft_id, options, which, only, overwrite)))
    return number[0]


def resume(draft_id: str) -> None:
    """Continue the last job where it ended. Raises RunError: there is none, or it runs already."""
    if (found := caption_work.stored(draft_id)) is None:
        raise RunError("There are no captions to continue; start them anew")
    _check(checked(found["options"]))
    _run(draft_id)


def _run(draft_id: str, prepare: Callable[[], object] = lambda: None) -> None:
    jobs.start(draft.folder(draft_id), JOB, ["ui.dataset.caption_work", draft_id, "--json"], LIMIT_S, prepare=prepare)


def cancel(draft_id: str) -> None:
    """End the job; the captions so far stay."""
    jobs.cancel(draft.folder(draft_id), JOB)


def running(draft_id: str) -> bool:
    """Whether captions are being written."""
    job = jobs.read(draft.folder(draft_id), JOB)
    return job is not None and job.state == "running"


def _check(options: dict[str, Any]) -> None:
    """What can be known before the job starts. Raises RunError."""
    for name in TEXTS:
        text = options.get(name, "")
        if not (PROMPT if name == "prompt" else LINE).fullmatch(text):
            raise RunError("Use at most 500 characters on one line, and at most 4,000 for the instruction")
    for name in ("general", "character"):
        if not 0 < options.get(name, 0.5) <= 1:
            raise RunError("A threshold is a number above 0 and at most 1, such as 0.35")
    if options["engine"] == "endpoint":
        endpoint.checked(
            endpoint.Server(options.get("url", ""), options.get("model", ""), "", options.get("key_variable", ""))
        )
        return
    models.find(options["engine"], options.get("model", ""))
    if options["engine"] == "tagger" and importlib.util.find_spec("onnxruntime") is None:
        from captions.tagger import INSTALL

        raise RunError(INSTALL)


def status(draft_id: str) -> dict[str, Any]:
    """How far the last job is: {"job": its id, "state", "seconds", "done", "total", "line", "failures", "error"}; state "" without one."""
    folder = draft.folder(draft_id)
    job = jobs.read(folder, JOB)
    if job is None or (found := caption_work.stored(draft_id)) is None:
        return {"job": "", "state": "", "seconds": 0, "done": 0, "total": 0, "line": "", "failures": [], "error": ""}
    text, _, errors = jobs.output(folder, JOB)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("{")]
    failures = [line for line in lines if ": no caption: " in line]
    others = [line for line in lines if line not in failures]
    done = len(caption_work.done(draft_id, found["job"]))
    error = errors.strip().splitlines()
    return {
        "job": found["job"],
        "state": job.state,
        "seconds": round(job.seconds),
        "done": done,
        "total": len(found["images"]),
        "line": others[-1] if others else "",
        "failures": failures[-MOST_FAILURES:],
        "error": error[-1].removeprefix("captions: ") if error and job.state not in ("running", "done") else "",
    }
