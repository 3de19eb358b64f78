""" "Write captions" in step 2: starts `python -m ui.dataset.caption_work`, and shows how far it is.

The job is a process of its own (ui/jobs.py) that stores each caption in the draft (ui/dataset/caption_work.py). So it goes on
when the server or the browser ends, and what it wrote is there when the page is opened again.
"""

import importlib.util
import re
from collections.abc import Callable, Iterable
from typing import Any

from captions import endpoint, models
from captions.options import checked
from runs.dataset import one_line
from runs.files import RunError
from ui import jobs
from ui.dataset import calls, caption_work, draft, draft_store
from ui.dataset.answers import OUT_OF_DATE, chosen_of

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
        raise RunError(OUT_OF_DATE)
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


# Calls of the script. Each takes a dict from the browser and checks every value -------------------------------------------


def _then(action: Callable[[str], None]) -> calls.Action:
    def call(draft_id: str, _data: dict[str, Any]) -> dict[str, Any]:
        action(draft_id)
        return {"status": status(draft_id)}

    return call


def captions_form(data: dict[str, Any]) -> dict[str, Any]:
    """What the form needs: the models, the options used last, and how many images each choice means."""

    def action(draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
        found = caption_work.stored(draft_id)
        entries = draft_store.read(draft_id)["images"].values()
        authors = [entry["caption_by"] if entry["caption"].strip() else "" for entry in entries]
        return {
            "models": [_model(row) for row in models.captioners().values()],
            "options": found["options"] if found else {},
            "prompt": endpoint.PROMPT,
            "url": PLACEHOLDER,
            "trigger": one_line(str(draft.form(draft_id).get("trigger") or "")),
            "counts": {
                "empty": authors.count(""),
                "model": authors.count("") + authors.count("model"),
                "all": len(authors),
                "person": authors.count("person") + authors.count("file"),
            },
            "status": status(draft_id),
        }

    return calls.answer(action, data)


def _model(row: models.Captioner) -> dict[str, Any]:
    here = models.present(row) is not None
    size = "on this machine" if here else f"downloads about {row.size_mb:,} MB from Hugging Face"
    return {
        "key": row.key,
        "engine": row.engine,
        "name": row.name,
        "note": row.note,
        "size": size,
        "licence": row.licence,
    }


def captions_status(data: dict[str, Any]) -> dict[str, Any]:
    """How far the job is."""
    return calls.answer(lambda draft_id, data: {"status": status(draft_id)}, data)


def captions_start(data: dict[str, Any]) -> dict[str, Any]:
    """Start the job with `options` for `which` images, of the selected `ids` or of all; `overwrite` as in `start`."""

    def action(draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
        options = data.get("options")
        if not isinstance(options, dict):
            raise RunError(OUT_OF_DATE)
        number = start(draft_id, options, str(data.get("which")), chosen_of(data), data.get("overwrite") is True)
        return {"number": number, "status": status(draft_id)}

    return calls.answer(action, data)


def captions_resume(data: dict[str, Any]) -> dict[str, Any]:
    """Continue the last job."""
    return calls.answer(_then(resume), data)


def captions_cancel(data: dict[str, Any]) -> dict[str, Any]:
    """End the job."""
    return calls.answer(_then(cancel), data)


CALLS = [captions_form, captions_status, captions_start, captions_resume, captions_cancel]
