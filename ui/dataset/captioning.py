"""Captions written by a model for a draft. `python -m ui.dataset.captioning DRAFT` is `python -m captions` for a draft.

The job is a process of its own (ui/jobs.py) that stores each caption in the draft as soon as it is known. So it goes on
when the server or the browser ends, and what it wrote is there when the page is opened again.

The draft says what the job is: its options, and the images that are not done, with the captions that they had. So a job
that was killed continues after the last one. A caption that a person wrote, or that came from a file, is replaced only
where the job says so, and never one that was changed meanwhile.
"""

import argparse
import importlib.util
import re
import secrets
import sys
from collections.abc import Callable, Iterable
from typing import Any

from captions import endpoint, models
from captions.options import OPTIONS, checked
from captions.work import Picture
from runs.files import RunError
from ui import jobs
from ui.dataset import draft, draft_store
from ui.dataset.draft_images import Entry

JOB = "captions"
LIMIT_S = 14 * 24 * 3600.0
MOST_FAILURES = 20
LINE = re.compile(r"[^\x00-\x1f\x7f]{0,500}")
PROMPT = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f]{0,4000}")
PLACEHOLDER = "http://127.0.0.1:11434/v1"
WHICH = ("empty", "model", "all")
STEP_IMAGES = 500  # captions that undo brings back at once


def start(
    draft_id: str,
    options: dict[str, Any],
    which: str = "empty",
    only: Iterable[str] | None = None,
    overwrite: bool = False,
) -> int:
    """Start to write captions in the background. Returns the number of images.

    Args: as begin.

    Raises:
        RunError: an option is not valid, there is nothing to do, or a job runs already.
    """
    if which not in WHICH:
        raise RunError(draft.OUT_OF_DATE)
    _check(checked(options))
    if running(draft_id):
        raise RunError("Captions are being written already; cancel that first")
    _run(draft_id, lambda: begin(draft_id, options, which, only, overwrite))
    return int(draft_store.read(draft_id)["captions"]["total"])


def resume(draft_id: str) -> None:
    """Continue the last job where it ended. Raises RunError: there is none, or it runs already."""
    if (found := stored(draft_id)) is None:
        raise RunError("There are no captions to continue; start them anew")
    _check(checked(found["options"]))
    _run(draft_id)


def _run(draft_id: str, prepare: Callable[[], object] = lambda: None) -> None:
    jobs.start(draft.folder(draft_id), JOB, ["ui.dataset.captioning", draft_id, "--json"], LIMIT_S, prepare=prepare)


def cancel(draft_id: str) -> None:
    """End the job; the captions so far stay."""
    jobs.cancel(draft.folder(draft_id), JOB)


def running(draft_id: str) -> bool:
    """Whether captions are being written."""
    return jobs.running(draft.folder(draft_id), JOB)


def _check(options: dict[str, Any]) -> None:
    """What can be known before the job starts. Raises RunError."""
    for name, text in options.items():
        if isinstance(text, str) and not (PROMPT if name == "prompt" else LINE).fullmatch(text):
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
    if job is None or (found := stored(draft_id)) is None:
        return {"job": "", "state": "", "seconds": 0, "done": 0, "total": 0, "line": "", "failures": [], "error": ""}
    text, _, errors = jobs.output(folder, JOB)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("{")]
    failures = [line for line in lines if ": no caption: " in line]
    others = [line for line in lines if line not in failures]
    error = errors.strip().splitlines()
    return {
        "job": found["job"],
        "state": job.state,
        "seconds": round(job.seconds),
        "done": found["total"] - len(draft_store.read(draft_id)["wanted"]),
        "total": found["total"],
        "line": others[-1] if others else "",
        "failures": failures[-MOST_FAILURES:],
        "error": error[-1].removeprefix("captions: ") if error and job.state not in ("running", "done") else "",
    }


# The job --------------------------------------------------------------------------------------------------------------


def begin(
    draft_id: str,
    options: dict[str, Any],
    which: str = "empty",
    only: Iterable[str] | None = None,
    overwrite: bool = False,
) -> int:
    """Store what the next job is. Returns the number of its images.

    Args:
        options: of `python -m captions`, by name. which: images without a caption ("empty"), also those with one that a
            model wrote ("model"), or "all". only: ids of the images to choose from; None: all.
        overwrite: with "all", also replace captions that a person wrote or that came from a file.

    Raises:
        RunError: there is nothing to do, or the disk does not take it.
    """
    chosen = None if only is None else set(only)
    with draft.locked(draft_id) as file:
        state, wanted = file.state, dict[str, Any]()
        for key, entry in state["images"].items():
            if chosen is not None and key not in chosen:
                continue
            # A text that nobody wrote is only the trigger word.
            empty, by_model = not entry["caption"].strip() or not entry["caption_by"], entry["caption_by"] == "model"
            if empty or (by_model and which != "empty") or (which == "all" and overwrite):
                wanted[key] = {"seen": entry["caption"]}
        if not wanted:
            raise RunError(
                "Every one of these images has a caption that is to be kept. Choose “All images”, or allow it to replace captions."
                if state["images"]
                else "Add images first"
            )
        job = {"job": secrets.token_hex(8), "options": options, "overwrite": overwrite, "total": len(wanted)}
        file.store({**state, "captions": job, "wanted": draft_store.placed(wanted)})
    return len(wanted)


def stored(draft_id: str) -> dict[str, Any] | None:
    """What the last job is; None when there was none."""
    return draft_store.read(draft_id)["captions"] or None


class DraftWork:
    """The images of a draft's job."""

    def __init__(self, draft_id: str) -> None:
        """Raises RunError: there is no job."""
        found = stored(draft_id)
        if found is None:
            raise RunError("This draft has no captions to write; start them on the page, or add --with")
        self.draft_id, self.job, self.total = draft_id, found["job"], found["total"]
        self.options, self.overwrite = found["options"], found["overwrite"]
        self.part, _ = self.counts()  # where this process began: its steps of undo are its own

    def missing(self) -> list[Picture]:
        state, root = draft_store.read(self.draft_id), draft.images_dir(self.draft_id)
        return [
            Picture(key, entry["file"], root / entry["stored"], entry["turn"], entry["crop"])
            for key in state["wanted"]
            if (entry := state["images"].get(key))
        ]

    def counts(self) -> tuple[int, int]:
        return self.total - len(draft_store.read(self.draft_id)["wanted"]), self.total

    def store(self, picture: Picture, caption: str) -> None:
        with draft.locked(self.draft_id) as file:
            wanted = dict(file.state["wanted"])
            seen = wanted.pop(picture.key, {}).get("seen")

            def make(key: str, entry: Entry) -> Entry | None:
                changed = entry["caption"] not in (seen, caption)
                by_a_person = entry["caption_by"] in (draft.PERSON, draft.FILE) and not self.overwrite
                if entry["caption"].strip() and (changed or by_a_person):
                    return None
                return draft.captioned(entry, draft.plain_text(caption), "model")

            part = (self.counts()[0] - self.part) // STEP_IMAGES
            step = f"captions:{self.job}:{self.part}:{part}"
            draft.change_images(self.draft_id, [picture.key], make, "captions written by a model", merge=step)
            file.store({**file.state, "wanted": wanted})


def draft_work(given: argparse.Namespace) -> tuple[DraftWork, argparse.Namespace]:
    """The images of a draft, and the options: without `--with`, those that the page stored."""
    if given.engine:
        begin(given.target, {name: getattr(given, name) for name in OPTIONS})
    work = DraftWork(given.target)
    return work, argparse.Namespace(**{**vars(given), **checked(work.options)})


if __name__ == "__main__":
    from captions.__main__ import main

    sys.exit(main(sys.argv[1:], draft_work))
