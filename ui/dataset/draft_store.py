"""A draft on disk: its folder, its SQLite database with a copy in memory, and the changes that undo knows.

Each browser has one folder, `datasets/.drafts/<id>/`, with `images/`, `thumbs/`, `masks/` and `draft.sqlite`. `change`
makes each change of images and captions one step of the history; form values are written without one, because undo is
for images.

A change writes only the rows that differ, in one transaction, so that a caption among 10,000 costs one row and not a
file of several megabytes. SQLite's write-ahead log makes a change complete or absent after a kill or a power cut, and
lets the processes that caption and import write to a draft that the page shows. Rows are JSON, with their position.

A step of the history is what the changed rows had on its other side. To undo or redo it exchanges them.
"""

import base64
import contextlib
import hashlib
import json
import math
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

from runs.files import REASONS, RunError, explained
from runs.paths import datasets_dir

State = dict[str, Any]
Step = dict[
    str, dict[str, dict[str, Any] | None]
]  # table → key → the values that differ on the other side; None: no row
PARTS = ("images", "texts")  # the tables that undo knows
TABLES = (*PARTS, "history", "wanted")  # wanted: images that a model is to caption (captioning.py)
NAME = "draft.sqlite"
BUSY_S = 60.0  # how long a change waits for that of another process
META: dict[str, Any] = {"form": {}, "kept": "", "refused": {}, "done": 0, "captions": {}}
# What a new image has. crop: left, top, right, bottom as fractions of the upright, rotated
# image; mask: the name of a file of the draft; weight: 1 to 10; caption_by: "person", "file", "model" or "".
FIELDS: dict[str, Any] = {"crop": None, "mask": None, "weight": 1, "caption_by": ""}
# What a user sees of an image. A change of other fields, such as where it came from, is stored without a step.
SHOWN = {"caption", "turn", "file", "folder", "crop", "mask", "weight", "position"}
VERSION = 2
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS content (part TEXT, key TEXT, value TEXT NOT NULL, PRIMARY KEY (part, key));
PRAGMA user_version = {VERSION};
"""
OUT_OF_DATE = "This page is out of date; reload it"
MAX_CAPTION = 20_000  # characters
HISTORY_STEPS = 100
# Of an image: what a run gets of it, for `digest`.
IN_A_RUN = ("sha256", "caption", "folder", "turn", "crop", "mask", "weight")
MAX_OPEN = 8  # drafts that are kept in memory; one of 10,000 images takes about 30 MB
lock = threading.RLock()  # the threads of a process share its open drafts
_open: OrderedDict[Path, "DraftFile"] = OrderedDict()


def empty() -> State:
    """A draft without anything."""
    return {**{table: {} for table in TABLES}, **META}


class DraftFile:
    """The open file of one draft. One thread uses it at a time.

    state: its content; replaced and never changed, so that a caller can keep it.
    """

    def __init__(self, path: Path):
        """Open a file, and create it where it is missing. Raises RunError: it is damaged, or the disk does not take
        it."""
        self.path, self.state, self.inode, self.version = path, empty(), 0, -1
        with self.explained():
            self.db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with self.explained():
                self.db.execute("PRAGMA journal_mode=WAL")  # stays a rollback journal where shared memory is missing
                self.db.execute("PRAGMA synchronous=FULL")
                found = self.db.execute("PRAGMA user_version").fetchone()[0]
                if found not in (0, VERSION):
                    raise sqlite3.DatabaseError("another version of Hangproof wrote it")
                if not found:
                    self.db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
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
            rows = self.db.execute("SELECT part, key, value FROM content").fetchall()
            values = json.loads(f"[{','.join(value for _, _, value in rows)}]")
            found: dict[str, dict[str, Any]] = {part: {} for part in (*TABLES, "meta")}
            for (part, key, _), value in zip(rows, values, strict=True):
                old = self.state[part].get(key) if part in TABLES else None
                found[part][key] = (
                    old if old == value else value
                )  # the same object, so that what was made of it is kept
            self.state = {**META, **found.pop("meta"), **{table: in_order(one) for table, one in found.items()}}
            self.version = version
        return self.state

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
            self.version = -1  # the next one to ask reads all of it again
            raise

    def store(self, state: State) -> None:
        """Store a content, in the transaction that the caller began."""
        with self.explained():
            before, self.state = self.state, state
            for part in (*TABLES, "meta"):
                old, new = ({key: one[key] for key in META} if part == "meta" else one[part] for one in (before, state))
                gone = [(part, key) for key in old if key not in new]
                self.db.executemany("DELETE FROM content WHERE part = ? AND key = ?", gone)
                rows = [(part, key, json.dumps(value)) for key, value in new.items() if old.get(key) is not value]
                self.db.executemany("INSERT OR REPLACE INTO content VALUES (?, ?, ?)", rows)


# Steps ---------------------------------------------------------------------------------------------------------------


def in_order(table: dict[str, Any]) -> dict[str, Any]:
    """A table sorted by the positions of its rows."""
    return dict(sorted(table.items(), key=lambda row: (row[1]["position"], row[0])))


def placed(table: dict[str, Any]) -> dict[str, Any]:
    """A table whose rows have positions in their order; only a row that is out of order gets another one."""
    found, last = {}, 0
    for key, row in table.items():
        found[key] = row if row.get("position", 0) > last else {**row, "position": last + 1}
        last = found[key]["position"]
    return found


def difference(before: State, after: State) -> Step:
    """The step that leads from the second content back to the first; empty when they are equal."""
    step: Step = {}
    for part in PARTS:
        old, new = before[part], after[part]
        changes: dict[str, dict[str, Any] | None] = {key: None for key in new if key not in old}
        for key, row in old.items():
            now = new.get(key)
            if now is None:
                changes[key] = row
            elif now is not row and (values := {name: row.get(name) for name in now if row.get(name) != now[name]}):
                changes[key] = values
        if changes:
            step[part] = changes
    return step


def exchanged(state: State, step: Step) -> tuple[State, Step]:
    """The content on the other side of a step, and the step that leads back."""
    state, back = dict(state), dict[str, Any]()
    for part, changes in step.items():
        table, back[part] = dict(state[part]), {}
        for key, values in changes.items():
            now = table.pop(key, None)
            back[part][key] = now
            if values is not None:
                table[key] = {**(now or {}), **values}
                if now is not None:
                    back[part][key] = {name: now.get(name) for name in values}
        state[part] = in_order(table)
    return state, back


def packed(step: Step) -> str:
    """A step as the history keeps it: of 10,000 captions it is large."""
    return base64.b64encode(zlib.compress(json.dumps(step).encode(), 1)).decode()


def unpacked(entry: Mapping[str, Any]) -> Step:
    """The step of an entry of the history. Raises RunError: it cannot be read."""
    try:
        found: Step = json.loads(zlib.decompress(base64.b64decode(entry["step"])))
    except (ValueError, zlib.error) as error:
        raise RunError(f"The step “{entry['label']}” cannot be read; this change cannot be undone") from error
    return found


def is_shown(step: Step, after: State) -> bool:
    """Whether a change changed something that a user sees: the images, or the captions that wait for one."""
    if any(values is None or SHOWN & values.keys() for values in step.get("images", {}).values()):
        return True
    for key, values in step.get("texts", {}).items():
        now = after["texts"].get(key)
        if "used" in values if values and now else not (values or now)["used"]:
            return True
    return False


def files_of_step(entry: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The files that undo and redo of an entry of the history need. Raises RunError: it cannot be read."""
    return files_of(unpacked(entry).get("images", {}))


def files_of(images: Mapping[str, Mapping[str, Any] | None]) -> set[tuple[str, str]]:
    """The files of the draft that images need: (kind, name); that of a "thumb" begins with the id."""
    found = {(kind, row[kind]) for row in images.values() if row for kind in ("stored", "mask") if row.get(kind)}
    return found | {("thumb", key) for key, row in images.items() if row and "stored" in row}


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
    close(path)
    with explained("store your changes"):
        path.parent.mkdir(parents=True, exist_ok=True)
    file = _open[path] = DraftFile(path)
    while len(_open) > MAX_OPEN:
        close(next(iter(_open)))
    return file


def close(path: Path) -> None:
    """Close the file of a draft where it is open."""
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


def write(draft_id: str, state: State) -> None:
    """Store a content that was read in the same `locked` block. Raises RunError: the disk does not take it."""
    _file(draft_id).store(state)


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
        after = {**edit.state, **{part: placed(edit.state[part]) for part in PARTS}}
        step = difference(before, after)
        if not is_shown(step, after):  # a file that was dropped again changes only where it came from
            if after != before:
                write(draft_id, after)
            return
        history, now = list(before["history"].values()), time.time()
        kept = history[: before["done"]]
        last = kept[-1] if kept == history and kept else None
        if merge and last and last["merge"] == merge and 0 <= now - last["at"] < within_s:
            with contextlib.suppress(RunError):  # a step that cannot be read stays as it is
                step, kept = difference(exchanged(before, unpacked(last))[0], after), kept[:-1]
        if step:
            label = edit.label if isinstance(edit.label, str) else edit.label(step)
            number = 1 + max((one["position"] for one in history), default=0)
            kept.append({"position": number, "label": label, "merge": merge, "at": now, "step": packed(step)})
        kept = kept[-HISTORY_STEPS:]
        for one in history:
            if one not in kept:
                with contextlib.suppress(RunError):  # a step that cannot be read frees nothing
                    freed |= files_of_step(one)
        write(draft_id, {**after, "history": {f"{one['position']}": one for one in kept}, "done": len(kept)})
    if freed:
        _delete_unneeded(draft_id, freed)


def _delete_unneeded(draft_id: str, freed: set[tuple[str, str]]) -> None:
    """Delete the files that steps which left the history named, and that no state names which undo or redo can reach.

    Decision: a state is reached from that of now by steps of the history, so a file that it names is named now, or by
    such a step. It is judged anew under the lock, after the change is stored: another change may name the
    file again.
    """
    with locked(draft_id):
        state = read(draft_id)
        needed = files_of(state["images"])
        try:
            for one in state["history"].values():
                needed |= files_of_step(one)
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
