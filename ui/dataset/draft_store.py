"""A draft on disk: its folder, its `draft.json`, and the steps that undo reads.

Each browser has one folder, `datasets/.drafts/<id>/`, with `images/`, `thumbs/`, `history/` and `draft.json`.
`draft.json` is replaced last, so a change is either complete or did not happen. `change` makes each change of images and
captions one step of the history; form values are written without one, because undo is for images.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from runs.files import RunError, atomic_write, explained
from runs.paths import datasets_dir
from ui.dataset import draft_history, draft_images
from ui.dataset.draft_images import Entry

MAX_CAPTION = 20_000  # characters
UPLOAD_EXPIRES_S = 24 * 3600
DRAFT_EXPIRES_S = 60 * 24 * 3600  # counted from the last time a page opened the draft
HISTORY_STEPS = 100
State = dict[str, Any]
lock = threading.RLock()  # one process serves the page; its threads share each draft.json


def new_id() -> str:
    """A new id. It cannot be guessed, because anyone who knows it can read the draft."""
    return secrets.token_hex(12)


def is_id(text: object) -> TypeGuard[str]:
    """Whether `text` is a valid draft id; a value from a browser is checked before it becomes part of a path."""
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{24}", text) is not None


def folder(draft_id: str) -> Path:
    """The draft's folder, which exists once something is stored.

    Raises:
        RunError: `draft_id` is not a valid id.
    """
    if not is_id(draft_id):
        raise RunError("This page is out of date; reload it")
    return datasets_dir() / ".drafts" / draft_id


def uploads_dir() -> Path:
    """Folder for incoming uploads."""
    return datasets_dir() / ".uploads"


def delete_expired() -> None:
    """Delete uploads after one day, and drafts that no page has opened for 60 days.

    An upload is deleted by its age only: two drops of one file share its path.
    """
    old = [path for path in uploads_dir().glob("*") if _age_s(path, *path.glob("*")) > UPLOAD_EXPIRES_S]
    drafts = (path for path in (datasets_dir() / ".drafts").glob("*") if is_id(path.name))
    for path in drafts:
        state = path / "draft.json"
        if _age_s(*([state] if state.exists() else [path])) > DRAFT_EXPIRES_S:
            old.append(path)
    unfinished = (datasets_dir() / ".drafts").glob("*/.new-*")  # of drops that ended with the server
    old += [path for path in unfinished if _age_s(path) > UPLOAD_EXPIRES_S]
    for path in old:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _age_s(*paths: Path) -> float:
    """Age in seconds of the newest of the paths that exist; 0 when none exists."""
    times = []
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return time.time() - max(times) if times else 0.0


def touch(draft_id: str) -> None:
    """Record that a page has opened this draft, which restarts its expiry."""
    with contextlib.suppress(OSError):  # not stored yet, or the disk is read-only, which the next edit reports
        os.utime(folder(draft_id) / "draft.json")


def images_dir(draft_id: str) -> Path:
    """The folder of the draft's images as they were dropped, and of removed ones that undo can bring back."""
    return folder(draft_id) / "images"


# The state on disk -----------------------------------------------------------------------------------------------------


def read(draft_id: str) -> State:
    """The content of `draft.json`; that of an empty draft where there is none. Raises RunError: it is damaged."""
    path = folder(draft_id) / "draft.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        state = {}
    except ValueError as error:
        raise RunError(f"{path} cannot be read ({error}); move it to another folder, then reload the page") from error
    if "waiting" in state:
        state = _upgraded(state)
    return {"images": {}, "texts": {}, "form": {}, "kept": "", "refused": {}, "history": [], "done": 0, **state}


def _upgraded(state: State) -> State:
    """A draft of an earlier version, whose images are named by their files."""
    images = {}
    for file, old in state.get("images", {}).items():
        key = draft_images.image_id("", old["sha256"])
        entry = {name: old[name] for name in ("width", "height", "sha256", "caption", "by_hand")}
        names = [["", old["stem"]]]
        images[key] = {**entry, "file": file, "stored": file, "folder": "", "names": names, **_UNMEASURED}
    texts = {f"/{stem}": {"text": text, "drop": "", "used": False} for stem, text in state["waiting"].items()}
    kept = {"images": images, "texts": texts, "form": state.get("form", {})}
    return {**kept, "kept": digest(kept) if state.get("kept") == _old_digest(state) else ""}


_UNMEASURED = {"bytes": 0, "hash": "", "upright": 0, "turn": 0}


def _old_digest(state: State) -> str:
    content = [(entry["sha256"], entry["caption"]) for entry in state.get("images", {}).values()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest() if content else ""


def write(draft_id: str, state: State) -> None:
    """Replace `draft.json`. Raises RunError: the disk does not take it."""
    target = folder(draft_id)
    with explained("store your changes"):
        target.mkdir(parents=True, exist_ok=True)
        atomic_write(target / "draft.json", json.dumps(state))


def _step_file(draft_id: str, number: int) -> Path:
    return folder(draft_id) / "history" / f"{number}.json"


def read_step(draft_id: str, number: int) -> draft_history.Step:
    """A step of the history. Raises RunError: it cannot be read."""
    path = _step_file(draft_id, number)
    try:
        step: draft_history.Step = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); this change cannot be undone") from error
    return step


@contextlib.contextmanager
def change(draft_id: str, merge: str = "", within_s: float = math.inf) -> Iterator["Edit"]:
    """Change a draft as one step that can be undone. The block changes `edit.state` and sets `edit.label`.

    Args:
        merge: steps with the same text that follow each other within `within_s` become one.
    """
    with lock:
        before = read(draft_id)
        edit = Edit({**before, **{part: dict(before[part]) for part in draft_history.PARTS}})
        yield edit
        step = draft_history.difference(before, edit.state)
        if _visible(before) == _visible(edit.state):  # a file that was dropped again changes only where it came from
            if edit.state != before:
                write(draft_id, edit.state)
            return
        history, now = before["history"], time.time()
        last = history[-1] if history and before["done"] == len(history) else None
        if merge and last and last["merge"] == merge and 0 <= now - last["at"] < within_s:
            with contextlib.suppress(RunError):  # a step that cannot be read stays as it is
                start = draft_history.applied(before, read_step(draft_id, last["n"]), draft_history.UNDO)
                step, history = draft_history.difference(start, edit.state), history[:-1]
        number = 1 + max((one["n"] for one in before["history"]), default=0)
        kept = history[: before["done"]][-HISTORY_STEPS + 1 :]
        if step:
            with explained("store your changes"):
                _step_file(draft_id, number).parent.mkdir(parents=True, exist_ok=True)
                atomic_write(_step_file(draft_id, number), json.dumps(step))
            kept = [*kept, {"n": number, "label": edit.label(step), "merge": merge, "at": now}]
        write(draft_id, {**edit.state, "history": kept, "done": len(kept)})
        _forget(draft_id, [one["n"] for one in before["history"] if one not in kept], kept, edit.state)


def _visible(state: State) -> tuple[list[Any], list[str]]:
    """What a user sees of the images and the captions that wait for one."""
    images = [(key, entry["caption"], entry["turn"]) for key, entry in state["images"].items()]
    return images, [key for key, text in state["texts"].items() if not text["used"]]


@dataclass
class Edit:
    """A change in progress. `label(step)` names it in the history, such as "caption of cat.png"."""

    state: State
    label: Callable[[draft_history.Step], str] = lambda step: "change"


def _forget(draft_id: str, gone: list[int], kept: list[dict[str, Any]], state: State) -> None:
    """Delete the files of steps that left the history, and of images that neither the draft nor the history needs."""
    lost: dict[str, Entry] = {}
    needed = {entry["stored"] for entry in state["images"].values()}
    with contextlib.suppress(RunError):
        for number in gone:
            lost |= draft_history.images_of(read_step(draft_id, number))
        if lost:
            for step in kept:
                needed |= {e["stored"] for e in draft_history.images_of(read_step(draft_id, step["n"])).values()}
        for key, entry in lost.items():
            if entry["stored"] not in needed:
                (images_dir(draft_id) / entry["stored"]).unlink(missing_ok=True)
                for path in (folder(draft_id) / "thumbs").glob(f"{key}*"):
                    path.unlink(missing_ok=True)
    for number in gone:
        _step_file(draft_id, number).unlink(missing_ok=True)


def digest(state: State) -> str:
    """Hash of all images and captions; "" when there are none."""
    content = [(key, entry["caption"], entry["turn"]) for key, entry in state["images"].items()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest() if content else ""


def plain_text(text: str) -> str:
    """Text that UTF-8 can hold: a browser can send half of a character that takes two."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def count(number: int, what: str) -> str:
    """`1 image`, `2 images`."""
    return f"{number} {what}{'s' * (number != 1)}"
