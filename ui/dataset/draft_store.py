"""A draft on disk: its folder, its SQLite database with a copy in memory, and the changes that undo knows.

Each browser has one folder, `datasets/.drafts/<id>/`, with `images/`, `thumbs/`, `masks/` and `draft.sqlite`. `change`
makes each change of images and captions one step of the history; form values are written without one, because undo is
for images.

A change writes only the rows that differ, in one transaction, so that a caption among 10,000 costs one row and not a
file of several megabytes. SQLite's write-ahead log makes a change complete or absent after a kill or a power cut, and
lets the processes that caption and import write to a draft that the page shows. Rows are JSON.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import sqlite3
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from runs import env_file
from runs.files import REASONS, RunError, explained
from runs.paths import datasets_dir
from ui import jobs
from ui.dataset import draft_history
from ui.dataset.draft_history import PARTS, State, Step

NAME = "draft.sqlite"
BUSY_S = 60.0  # how long a change waits for that of another process
META: dict[str, Any] = {"form": {}, "kept": "", "refused": {}, "done": 0}
# What a new image has. crop: left, top, right, bottom as fractions of the upright, rotated
# image; mask: the name of a file of the draft; weight: 1 to 10; caption_by: "person", "file", "model" or "".
FIELDS: dict[str, Any] = {"crop": None, "mask": None, "weight": 1, "caption_by": ""}
SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS images (key TEXT PRIMARY KEY, position REAL NOT NULL, revision INTEGER NOT NULL, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS texts (key TEXT PRIMARY KEY, position REAL NOT NULL, revision INTEGER NOT NULL, value TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS images_order ON images (position, key);
CREATE INDEX IF NOT EXISTS images_revision ON images (revision);
CREATE INDEX IF NOT EXISTS texts_order ON texts (position, key);
CREATE INDEX IF NOT EXISTS texts_revision ON texts (revision);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS steps (n INTEGER PRIMARY KEY, label TEXT NOT NULL, merge TEXT NOT NULL, at REAL NOT NULL, step BLOB NOT NULL);
PRAGMA user_version = 1;
COMMIT;
"""
OUT_OF_DATE = "This page is out of date; reload it"
MAX_CAPTION = 20_000  # characters
UPLOAD_EXPIRES_S = 24 * 3600
DRAFT_EXPIRES_S = 60 * 24 * 3600  # counted from the last time a page opened the draft
HISTORY_STEPS = 100
# Of an image: what a run gets of it, for `digest`.
IN_A_RUN = ("sha256", "caption", "folder", "turn", "crop", "mask", "weight")
MAX_OPEN = 8  # drafts that are kept in memory; one of 10,000 images takes about 30 MB
lock = threading.RLock()  # the threads of a process share its open drafts
_open: OrderedDict[Path, "DraftFile"] = OrderedDict()


def empty() -> State:
    """A draft without anything."""
    return {"images": {}, "texts": {}, **META, "history": []}


class DraftFile:
    """The open file of one draft. One thread uses it at a time.

    state: its content; replaced and never changed, so that a caller can keep it.
    """

    def __init__(self, path: Path):
        """Open a file, and create it where it is missing. Raises RunError: it is damaged, or the disk does not take
        it."""
        self.path, self.state, self.inode = path, empty(), 0
        self.revision = self.version = -1
        self.positions: dict[str, dict[str, float]] = {part: {} for part in PARTS}
        with self.explained():
            self.db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with self.explained():
                self.db.execute("PRAGMA journal_mode=WAL")  # stays a rollback journal where shared memory is missing
                self.db.execute("PRAGMA synchronous=FULL")
                if not self.db.execute("PRAGMA user_version").fetchone()[0]:
                    self.db.executescript(SCHEMA)
                self.inode = path.stat().st_ino
                self.refresh()
        except BaseException:
            self.db.close()
            raise

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an error of the database into a RunError that says what to do."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            said = f"{self.path} cannot be read ({error}); move it to another folder, then reload the page"
            if code == sqlite3.SQLITE_FULL:
                said = f"cannot store your changes ({self.path}): {REASONS[28]}"
            elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                said = f"{self.path} has been in use for {BUSY_S:.0f} s; try again"
            elif code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
                advice = "check that the disk has space, and that the folder can be written"
                said = f"cannot store your changes ({self.path}): {error}; {advice}"
            raise RunError(said) from error

    # Reading ---------------------------------------------------------------------------------------------------------

    def refresh(self) -> State:
        """The content, read again where another process changed it."""
        with self.explained():
            version = self.db.execute("PRAGMA data_version").fetchone()[0]
            if version == self.version:
                return self.state
            joins = not self.db.in_transaction
            if joins:
                self.db.execute("BEGIN")  # all tables are read as of one moment
            try:
                rows = self.db.execute("SELECT * FROM meta")
                found = {"revision": 0, **{key: json.loads(value) for key, value in rows}}
                if found["revision"] != self.revision:
                    parts = {part: self._rows(part) for part in PARTS}
                    history = [
                        {"n": n, "label": label, "merge": merge, "at": at}
                        for n, label, merge, at in self.db.execute("SELECT n, label, merge, at FROM steps ORDER BY n")
                    ]
                    self.revision = found.pop("revision")
                    self.state = {**parts, **META, **found, "history": history}
            finally:
                if joins:
                    self.db.execute("COMMIT")
            self.version = version
        return self.state

    def _rows(self, part: str) -> dict[str, Any]:
        """A table in its order. Only rows that changed since the last time are parsed."""
        places = dict(self.db.execute(f"SELECT key, position FROM {part} ORDER BY position, key"))
        self.positions = {**self.positions, part: places}
        rows = self.db.execute(f"SELECT key, value FROM {part} WHERE revision > ?", (self.revision,)).fetchall()
        values = json.loads(f"[{','.join(value for _, value in rows)}]")
        changed = {key: value for (key, _), value in zip(rows, values, strict=True)}
        old = self.state[part]
        return {key: changed[key] if key in changed else old[key] for key in self.positions[part]}

    def step(self, number: int) -> Step:
        """A step of the history. Raises RunError: it cannot be read."""
        with self.explained():
            row = self.db.execute("SELECT step FROM steps WHERE n = ?", (number,)).fetchone()
        try:
            found: Step = json.loads(zlib.decompress(row[0]))
        except (TypeError, ValueError, zlib.error) as error:
            raise RunError(f"{self.path}: step {number} cannot be read; this change cannot be undone") from error
        return found

    # Writing ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep other processes from changing the draft; all that the block stores is kept when it ends without an error."""
        if self.db.in_transaction:
            yield
            return
        with self.explained():
            self.db.execute("BEGIN IMMEDIATE")
        try:
            self.refresh()
            yield
            with self.explained():
                self.db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self.db.execute("ROLLBACK")
            self.revision = self.version = -1  # the next one to ask reads all of it again
            raise

    def store(self, state: State, step: Step | None) -> None:
        """Store a content, in the transaction that the caller began. step: that of its history's last entry, if it is new."""
        with self.explained():
            before, self.state, self.revision = self.state, state, self.revision + 1
            for part in PARTS:
                self._write_rows(part, before[part], state[part])
            for key in META:
                if state[key] != before[key]:
                    self._write_meta(key, state[key])
            numbers = {one["n"] for one in state["history"]}
            gone = [(one["n"],) for one in before["history"] if one["n"] not in numbers]
            self.db.executemany("DELETE FROM steps WHERE n = ?", gone)
            if step:
                content = zlib.compress(json.dumps(step).encode(), 1)
                row = {**state["history"][-1], "step": content}
                self.db.execute("INSERT OR REPLACE INTO steps VALUES (:n, :label, :merge, :at, :step)", row)
            self._write_meta("revision", self.revision)

    def _write_meta(self, key: str, value: Any) -> None:
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def _write_rows(self, part: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        if after is before:
            return
        self.db.executemany(f"DELETE FROM {part} WHERE key = ?", [(key,) for key in before if key not in after])
        moved = new_positions(self.positions[part], list(after))
        positions = {**self.positions[part], **moved}
        changed = [
            (key, positions[key], self.revision, json.dumps(value))
            for key, value in after.items()
            if before.get(key) is not value
        ]
        self.db.executemany(f"INSERT OR REPLACE INTO {part} VALUES (?, ?, ?, ?)", changed)
        places = [(moved[key], key) for key in moved if before.get(key) is after[key]]
        self.db.executemany(f"UPDATE {part} SET position = ? WHERE key = ?", places)
        self.positions = {**self.positions, part: {key: positions[key] for key in after}}


def new_positions(known: Mapping[str, float], order: list[str]) -> dict[str, float]:
    """The positions to store so that sorting by position gives `order`: those of new keys, and of keys whose place changed.

    Args:
        known: the positions stored now.
    """
    found: dict[str, float] = {}
    last = 0.0
    for key in order:
        if known.get(key, 0.0) > last:
            last = known[key]
        else:
            found[key] = last = last + 1
    return found


# The folder ----------------------------------------------------------------------------------------------------------


def new_id() -> str:
    """A new id. It cannot be guessed, because anyone who knows it can read the draft."""
    return secrets.token_hex(12)


def is_id(text: object) -> TypeGuard[str]:
    """Whether `text` is a valid draft id; a value from a browser is checked before it becomes part of a path."""
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{24}", text) is not None


def folder(draft_id: str) -> Path:
    """The draft's folder, which exists once something is stored. Raises RunError: `draft_id` is not a valid id."""
    if not is_id(draft_id):
        raise RunError(OUT_OF_DATE)
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
        expired = [path] if (_age_s(*files_of(path)) or _age_s(path)) > DRAFT_EXPIRES_S else []
        unfinished = path.glob(".new-*")  # of drops that ended with the server
        expired += [new for new in unfinished if _age_s(new) > UPLOAD_EXPIRES_S]
        if expired and not _at_work(path):
            old += expired
    for path in old:
        _close(path / NAME)
        for kept in (path, path / "script.json", path / "rehearsal"):
            env_file.forget(kept)
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _at_work(draft: Path) -> bool:
    """Whether a command works at a draft."""
    places = [draft, *(path.parent for path in draft.glob(f"*/{jobs.FOLDER}"))]
    return any(job.state == "running" for place in places for job in jobs.all_of(place).values())


def files_of(draft: Path) -> list[Path]:
    """The files with the content of the draft in a folder, whether they exist or not."""
    return [draft / NAME, draft / f"{NAME}-wal"]


def last_used(*paths: Path) -> float:
    """When the newest of the paths that exist was changed, in seconds since 1970; 0 when none exists."""
    times = [0.0]
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _age_s(*paths: Path) -> float:
    """Age in seconds of the newest of the paths that exist; 0 when none exists."""
    newest = last_used(*paths)
    return time.time() - newest if newest else 0.0


def touch(draft_id: str) -> None:
    """Record that a page has opened this draft, which restarts its expiry."""
    with contextlib.suppress(OSError):  # not stored yet, or the disk is read-only, which the next edit reports
        for path in files_of(folder(draft_id)):
            os.utime(path)


@contextlib.contextmanager
def working(draft_id: str) -> Iterator[Path]:
    """A folder of the draft for files that are not stored yet, which is deleted at the end."""
    work = folder(draft_id) / f".new-{secrets.token_hex(6)}"
    try:
        work.mkdir(parents=True)
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def images_dir(draft_id: str) -> Path:
    """The folder of the draft's images as they were dropped, and of removed ones that undo can bring back."""
    return folder(draft_id) / "images"


def masks_dir(draft_id: str) -> Path:
    """The folder of the masks that images of the draft have."""
    return folder(draft_id) / "masks"


# The content -----------------------------------------------------------------------------------------------------


def _file(draft_id: str) -> DraftFile:
    """The open file of a draft, which is created where nothing was stored yet."""
    path = folder(draft_id) / NAME
    inode = path.stat().st_ino if path.exists() else 0
    known = _open.get(path)
    if known is not None and known.inode == inode:
        _open.move_to_end(path)
        return known
    _close(path)
    with explained("store your changes"):
        path.parent.mkdir(parents=True, exist_ok=True)
    file = _open[path] = DraftFile(path)
    while len(_open) > MAX_OPEN:
        _close(next(iter(_open)))
    return file


def _close(path: Path) -> None:
    with lock:
        if (known := _open.pop(path, None)) is not None:
            known.db.close()


def read(draft_id: str) -> State:
    """The content of a draft; that of an empty draft where nothing was stored. Change no table in it: they are shared.
    Raises RunError: its file is damaged."""
    with lock:
        return _file(draft_id).refresh() if (folder(draft_id) / NAME).exists() else empty()


@contextlib.contextmanager
def locked(draft_id: str) -> Iterator[None]:
    """Keep other threads and processes from changing a draft. What the block writes is stored together when it ends."""
    with lock, _file(draft_id).transaction():
        yield


def write(draft_id: str, state: State, step: Step | None = None) -> None:
    """Store a content that was read in the same `locked` block. step: that of its history's last entry, if it is new.
    Raises RunError: the disk does not take it."""
    _file(draft_id).store(state, step)


def read_step(draft_id: str, number: int) -> Step:
    """A step of the history. Raises RunError: it cannot be read."""
    with lock:
        return _file(draft_id).step(number)


@contextlib.contextmanager
def change(draft_id: str, merge: str = "", within_s: float = math.inf) -> Iterator["Edit"]:
    """Change a draft as one step that can be undone. The block changes `edit.state` and sets `edit.label`.

    Args:
        merge: steps with the same text that follow each other within `within_s` become one.
    """
    freed: set[tuple[str, str]] = set()
    with locked(draft_id):
        before = read(draft_id)
        edit = Edit({**before, **{part: dict(before[part]) for part in PARTS}})
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
        kept = history[: before["done"]][-HISTORY_STEPS + 1 :]
        if step:
            kept = [
                *kept,
                {
                    "n": number,
                    "label": edit.label if isinstance(edit.label, str) else edit.label(step),
                    "merge": merge,
                    "at": now,
                },
            ]
        gone = [one["n"] for one in before["history"] if one not in kept]
        for one in gone:
            with contextlib.suppress(RunError):  # a step that cannot be read frees nothing
                freed |= draft_history.files_of_step(read_step(draft_id, one))
        write(draft_id, {**edit.state, "history": kept, "done": len(kept)}, step)
    if freed:
        _delete_unneeded(draft_id, freed)


def _delete_unneeded(draft_id: str, freed: set[tuple[str, str]]) -> None:
    """Delete the files that steps which left the history named, and that no state names which undo or redo can reach.

    Decision: a state is reached from that of now by steps of the history, so a file that it names is named now, or on
    one side of such a step. It is judged anew under the lock, after the change is stored: another change may name the
    file again.
    """
    with locked(draft_id):
        state = read(draft_id)
        needed = draft_history.files_of(state["images"].items())
        try:
            for one in state["history"]:
                needed |= draft_history.files_of_step(read_step(draft_id, one["n"]))
        except RunError:
            return  # a step that cannot be read may name any of them
        places = {"stored": images_dir(draft_id), "mask": masks_dir(draft_id), "thumb": folder(draft_id) / "thumbs"}
        for kind, name in freed - needed:
            for path in places[kind].glob(f"{name}*") if kind == "thumb" else [places[kind] / name]:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


@dataclass
class Edit:
    """A change in progress. `label` names it in the history, such as "caption of cat.png"; or says how, from the step."""

    state: State
    label: str | Callable[[Step], str] = "change"


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
