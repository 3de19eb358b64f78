"""A draft on disk: its folder, its file, and the changes that undo knows.

Each browser has one folder, `datasets/.drafts/<id>/`, with `images/`, `thumbs/` and `draft.sqlite` (draft_file.py).
`change` makes each change of images and captions one step of the history; form values are written without one, because
undo is for images.
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
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from runs import env_file
from runs.files import RunError, explained
from runs.paths import datasets_dir
from ui import jobs
from ui.dataset import draft_file, draft_history
from ui.dataset.draft_file import DraftFile, State

MAX_CAPTION = 20_000  # characters
UPLOAD_EXPIRES_S = 24 * 3600
DRAFT_EXPIRES_S = 60 * 24 * 3600  # counted from the last time a page opened the draft
HISTORY_STEPS = 100
# Of an image: what a run gets of it, for `digest`.
IN_A_RUN = ("sha256", "caption", "folder", "turn", "crop", "mask", "weight")
MAX_OPEN = 8  # drafts that are kept in memory; one of 10,000 images takes about 30 MB
lock = threading.RLock()  # the threads of a process share its open drafts
_open: OrderedDict[Path, DraftFile] = OrderedDict()


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

    An upload is deleted by its age only: two drops of one file share its path, and an import has a link of its own. A
    draft at which a command works (ui/jobs.py) stays as it is: after a night's sleep, what it writes is old too.
    """
    old = [path for path in uploads_dir().glob("*") if _age_s(path, *path.glob("*")) > UPLOAD_EXPIRES_S]
    for path in (path for path in (datasets_dir() / ".drafts").glob("*") if is_id(path.name)):
        expired = [path] if _age_s(*(_files_of(path) or [path])) > DRAFT_EXPIRES_S else []
        expired += [
            new for new in path.glob(".new-*") if _age_s(new) > UPLOAD_EXPIRES_S
        ]  # of drops that ended with the server
        if expired and not _at_work(path):
            old += expired
    for path in old:
        _close(path / draft_file.NAME)
        for kept in (path, path / "script.json", path / "rehearsal"):
            env_file.forget(kept)
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _at_work(draft: Path) -> bool:
    """Whether a command works at a draft."""
    places = [draft, *(path.parent for path in draft.glob(f"*/{jobs.FOLDER}"))]
    return any(job.state == "running" for place in places for job in jobs.all_of(place).values())


def _files_of(draft: Path) -> list[Path]:
    """The files with a draft's content that exist."""
    names = (draft_file.NAME, f"{draft_file.NAME}-wal")
    return [path for name in names if (path := draft / name).exists()]


def last_used(draft: Path) -> float:
    """When the draft in a folder was opened or changed last, in seconds since 1970; 0 where there is none."""
    return max((path.stat().st_mtime for path in _files_of(draft)), default=0.0)


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
        for path in _files_of(folder(draft_id)):
            os.utime(path)


def images_dir(draft_id: str) -> Path:
    """The folder of the draft's images as they were dropped, and of removed ones that undo can bring back."""
    return folder(draft_id) / "images"


def masks_dir(draft_id: str) -> Path:
    """The folder of the masks that images of the draft have."""
    return folder(draft_id) / "masks"


# The state on disk -----------------------------------------------------------------------------------------------------


def _file(draft_id: str, create: bool = False) -> DraftFile | None:
    """The open file of a draft; None where nothing was stored yet, unless it is to be created."""
    place = folder(draft_id)
    path = place / draft_file.NAME
    inode = path.stat().st_ino if path.exists() else 0
    known = _open.get(path)
    if known is not None and known.inode == inode:
        _open.move_to_end(path)
        return known
    _close(path)
    if not inode and not create:
        return None
    with explained("store your changes"):
        place.mkdir(parents=True, exist_ok=True)
    file = _open[path] = DraftFile(path)
    while len(_open) > MAX_OPEN:
        _close(next(iter(_open)))
    return file


def _close(path: Path) -> None:
    with lock:
        if (known := _open.pop(path, None)) is not None:
            known.close()


def read(draft_id: str) -> State:
    """The content of a draft; that of an empty draft where nothing was stored. Change no table in it: they are shared.

    Raises:
        RunError: its file is damaged.
    """
    with lock:
        file = _file(draft_id)
        return draft_file.empty() if file is None else file.refresh()


@contextlib.contextmanager
def locked(draft_id: str) -> Iterator[None]:
    """Keep other threads and processes from changing a draft. What the block writes is stored together when it ends."""
    with lock:
        file = _file(draft_id)
        with file.transaction() if file else contextlib.nullcontext():
            yield


def write(draft_id: str, state: State, steps: dict[int, draft_history.Step] | None = None) -> None:
    """Store a content that was read in the same `locked` block, with the steps that are new in its history.

    Raises:
        RunError: the disk does not take it.
    """
    file = _file(draft_id, create=True)
    assert file is not None
    created = not file.db.in_transaction
    with file.transaction():
        if created and file.state != draft_file.empty():
            raise RunError("Another process changed this draft at the same moment; try again")
        file.store(state, steps or {})


def read_step(draft_id: str, number: int) -> draft_history.Step:
    """A step of the history. Raises RunError: it cannot be read."""
    with lock:
        file = _file(draft_id)
        if file is None:
            raise RunError("This page is out of date; reload it")
        return file.step(number)


@contextlib.contextmanager
def change(draft_id: str, merge: str = "", within_s: float = math.inf) -> Iterator["Edit"]:
    """Change a draft as one step that can be undone. The block changes `edit.state` and sets `edit.label`.

    Args:
        merge: steps with the same text that follow each other within `within_s` become one.
    """
    freed: set[tuple[str, str]] = set()
    with locked(draft_id):
        before = read(draft_id)
        edit = Edit({**before, **{part: dict(before[part]) for part in draft_history.PARTS}})
        yield edit
        step = draft_history.difference(before, edit.state)
        if not draft_history.is_shown(step):  # a file that was dropped again changes only where it came from
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
        kept, steps = history[: before["done"]][-HISTORY_STEPS + 1 :], {}
        if step:
            steps = {number: step}
            kept = [*kept, {"n": number, "label": edit.label(step), "merge": merge, "at": now}]
        gone = [one["n"] for one in before["history"] if one not in kept]
        for one in gone:
            with contextlib.suppress(RunError):  # a step that cannot be read frees nothing
                freed |= _needed_by(read_step(draft_id, one))
        write(draft_id, {**edit.state, "history": kept, "done": len(kept)}, steps)
    if freed:
        _delete_unneeded(draft_id, freed)


def _needed_by(step: draft_history.Step) -> set[tuple[str, str]]:
    """What undo and redo of a step need: its files, and the thumbnails of images that it adds or removes."""
    return draft_history.files_of_step(step) | {("thumb", key) for key in draft_history.images_of(step)}


def _delete_unneeded(draft_id: str, freed: set[tuple[str, str]]) -> None:
    """Delete the files that steps which left the history named, and that no state names which undo or redo can reach.

    Decision: a state is reached from that of now by steps of the history, so a file that it names is named now, or on
    one side of such a step. It is judged anew under the lock, after the change is stored: another change may name the
    file again.
    """
    with locked(draft_id):
        state = read(draft_id)
        needed = draft_history.files_of(state["images"].values()) | {("thumb", key) for key in state["images"]}
        try:
            for one in state["history"]:
                needed |= _needed_by(read_step(draft_id, one["n"]))
        except RunError:
            return  # a step that cannot be read may name any of them
        places = {"stored": images_dir(draft_id), "mask": masks_dir(draft_id), "thumb": folder(draft_id) / "thumbs"}
        for kind, name in freed - needed:
            for path in places[kind].glob(f"{name}*") if kind == "thumb" else [places[kind] / name]:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


@dataclass
class Edit:
    """A change in progress. `label(step)` names it in the history, such as "caption of cat.png"."""

    state: State
    label: Callable[[draft_history.Step], str] = lambda step: "change"


def digest(state: State) -> str:
    """Hash of all images and captions; "" when there are none."""
    content = [[entry[name] for name in IN_A_RUN] for entry in state["images"].values()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest() if content else ""


def plain_text(text: str) -> str:
    """Text that UTF-8 can hold: a browser can send half of a character that takes two."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def count(number: int, what: str) -> str:
    """`1 image`, `2 images`."""
    return f"{number} {what}{'s' * (number != 1)}"
