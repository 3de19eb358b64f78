"""A draft on disk: its folder, its SQLite database with a copy in memory, and the changes that undo knows.

Each browser has one folder, `datasets/.drafts/<id>/`, with `images/`, `thumbs/`, `masks/` and `draft.sqlite`. `change`
makes each change of images and captions one step of the history; form values are written without one, because undo is
for images.

A change writes only the rows that differ, in one transaction, so that a caption among 10,000 costs one row and not a
file of several megabytes. SQLite's write-ahead log makes a change complete or absent after a kill or a power cut, with
one fsync, and lets the processes that caption and import write to a draft that the page shows. Its index is a mapped
file, and reading one of a network drive that fails ends the process (SIGBUS). So a draft on such a drive has a rollback
journal, with five fsyncs.
Rows are JSON, with their position.

A step of the history is what the changed rows had before it. To undo it puts these values back, and keeps what they
replaced, which redo puts back.
"""

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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from presets import lint
from runs.files import REASONS, RunError, explained
from runs.paths import datasets_dir

State = dict[str, Any]
# (table, key) → the values that differ on the other side; None: no row
Step = dict[tuple[str, str], dict[str, Any] | None]
PARTS = ("images", "texts")  # the tables that undo knows
TABLES = (*PARTS, "wanted")  # wanted: images that a model is to caption (captioning.py)
NAME = "draft.sqlite"
BUSY_S = 60.0  # how long a change waits for that of another process
# done: the number of the last step that is not undone
# kept, settings: the digest of the images and the settings that a run has
META: dict[str, Any] = {"form": {}, "kept": "", "settings": [{}, ""], "refused": {}, "done": 0, "captions": {}}
# What a new image has. crop: left, top, right, bottom as fractions of the upright, rotated
# image; mask: the name of a file of the draft; weight: 1 to 10; caption_by: "person", "file", "model" or "".
FIELDS: dict[str, Any] = {"crop": None, "mask": None, "weight": 1, "caption_by": ""}
# What a user sees of an image. A change of other fields, such as where it came from, is stored without a step.
SHOWN = {"caption", "turn", "file", "folder", "crop", "mask", "weight", "position"}
VERSION = 3
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS content (part TEXT, key TEXT, value TEXT NOT NULL, PRIMARY KEY (part, key));
CREATE TABLE IF NOT EXISTS steps (number INTEGER PRIMARY KEY, label TEXT, merge TEXT, at REAL);
CREATE TABLE IF NOT EXISTS undo (step INTEGER, part TEXT, key TEXT, value TEXT NOT NULL, PRIMARY KEY (step, part, key));
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

    state: its content; replaced and never changed, so that a caller can keep it. memory: what others computed from it.
    """

    def __init__(self, path: Path):
        """Open a file, and create it where it is missing. Raises RunError: it is damaged, or the disk does not take
        it."""
        self.path, self.state, self.inode, self.version = path, empty(), 0, -1
        self.memory: dict[str, Any] = {}
        with self.explained():
            self.db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            mode = "TRUNCATE" if lint.NETWORK.fullmatch(lint.file_system(path.resolve())[0]) else "WAL"
            with contextlib.suppress(RunError):  # another process has it open in another mode
                self.sql(f"PRAGMA journal_mode={mode}")
            self.sql("PRAGMA synchronous=FULL")
            ((found,),) = self.sql("PRAGMA user_version")
            with self.explained():
                if found not in (0, VERSION):  # 0: a new file
                    raise sqlite3.DatabaseError("another version wrote it; its Export (ZIP) keeps the captions")
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
        except (sqlite3.Error, ValueError) as error:  # ValueError: a row is no JSON
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            said = f"{self.path} cannot be read ({error}); its images are in {self.path.parent / 'images'}. "
            said += f"Move {self.path.parent} to another place, reload the page, and add them again"
            if code == sqlite3.SQLITE_FULL:
                said = f"cannot store your changes ({self.path}): {REASONS[28]}"
            elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                said = f"{self.path} has been in use for {BUSY_S:.0f} s; try again"
            elif code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
                advice = "check that the disk has space, and that the folder can be written"
                said = f"cannot store your changes ({self.path}): {error}; {advice}"
            raise RunError(said) from error

    def sql(self, words: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a statement."""
        with self.explained():
            return self.db.execute(words, values).fetchall()

    def sql_for_each(self, words: str, rows: list[tuple[Any, ...]]) -> None:
        """Do a statement for each row of values."""
        with self.explained():
            self.db.executemany(words, rows)

    # Reading ---------------------------------------------------------------------------------------------------------

    def refresh(self) -> State:
        """The content, read again where another process changed it."""
        ((version,),) = self.sql("PRAGMA data_version")
        if version == self.version:
            return self.state
        rows = self.sql("SELECT part, key, value FROM content")
        with self.explained():
            values = json.loads(f"[{','.join(value for _, _, value in rows)}]")
        found: dict[str, dict[str, Any]] = {part: {} for part in (*TABLES, "meta")}
        for (part, key, _), value in zip(rows, values, strict=True):
            old = self.state[part].get(key) if part in TABLES else None
            found[part][key] = old if old == value else value  # the same object: what was made of it is kept
        self.state = {**META, **found.pop("meta"), **{table: in_order(one) for table, one in found.items()}}
        self.version = version
        return self.state

    # Writing ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep other processes from changing the draft; what the block stores is kept if it ends without an error."""
        if self.db.in_transaction:
            yield
            return
        self.sql("BEGIN IMMEDIATE")
        try:
            self.refresh()
            yield
            self.sql("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self.db.execute("ROLLBACK")
            self.version = -1  # the next one to ask reads all of it again
            raise

    def store(self, state: State) -> None:
        """Store a content, in the transaction that the caller began."""
        before, self.state = self.state, state
        for part in (*TABLES, "meta"):
            old, new = ({key: one[key] for key in META} if part == "meta" else one[part] for one in (before, state))
            gone = [(part, key) for key in old if key not in new]
            self.sql_for_each("DELETE FROM content WHERE part = ? AND key = ?", gone)
            rows = [(part, key, json.dumps(value)) for key, value in new.items() if old.get(key) is not value]
            self.sql_for_each("INSERT OR REPLACE INTO content VALUES (?, ?, ?)", rows)

    # The history ------------------------------------------------------------------------------------------------------

    def label(self, number: int) -> str:
        """What a step is called; "" where there is no such step."""
        found = self.sql("SELECT label FROM steps WHERE number = ?", number)
        return str(found[0][0]) if found else ""

    def step(self, number: int, rows: Iterable[tuple[str, str]] | None = None) -> Step:
        """What leads to the other side of a step, or what it has of some rows. Raises RunError: it cannot be read."""
        words = "SELECT part, key, value FROM undo WHERE step = ?"
        found = self.sql(words, number) if rows is None else []
        for row in rows or ():
            found += self.sql(f"{words} AND part = ? AND key = ?", number, *row)
        try:
            return {(part, key): json.loads(value) for part, key, value in found}
        except ValueError as error:
            raise RunError(f"The step “{self.label(number)}” cannot be read; this change cannot be undone") from error

    def set_step(self, number: int, old: Step, new: Step) -> None:
        """Store rows of a step in place of old ones; its other rows stay."""
        self.sql_for_each("DELETE FROM undo WHERE step = ? AND part = ? AND key = ?", [(number, *row) for row in old])
        rows = [(number, part, key, json.dumps(values)) for (part, key), values in new.items()]
        self.sql_for_each("INSERT INTO undo VALUES (?, ?, ?, ?)", rows)

    def add_step(self, after: State, edit: "Edit", merge: str, within_s: float) -> int:
        """Store the step from the content of now to another one. Returns its number, or that of the last one where both
        contents are equal. Args: see `change`. Of a step that it joins, only the rows that change are read and written:
        a drop of 5,000 images is hundreds of changes."""
        step, done, joined = difference(self.state, after), self.state["done"], Step()
        last = self.sql(
            "SELECT merge, at FROM steps WHERE number = ? AND number = (SELECT max(number) FROM steps)", done
        )
        number = done + 1
        if merge and last and last[0][0] == merge and 0 <= time.time() - last[0][1] < within_s:
            with contextlib.suppress(RunError):  # a step that cannot be read stays as it is
                joined, number = self.step(done, step), done
        before, now = (
            {part: {key: one[part][key] for of, key in joined if of == part and key in one[part]} for part in PARTS}
            for one in (self.state, after)
        )
        step = {row: values for row, values in step.items() if row not in joined}
        step |= difference(applied(before, joined), now)
        for table, column in (("steps", "number"), ("undo", "step")):
            self.sql(f"DELETE FROM {table} WHERE {column} > ? OR {column} <= ?", done, number - HISTORY_STEPS)
        self.set_step(number, joined, step)
        count = "SELECT count(*), sum(part = 'images' AND value = 'null') FROM undo WHERE step = ?"
        ((rows, images),) = self.sql(count, number)
        self.sql("DELETE FROM steps WHERE number = ?", number)
        if not rows:
            return number - 1
        label = edit.label if isinstance(edit.label, str) else edit.label(images)
        self.sql("INSERT INTO steps VALUES (?, ?, ?, ?)", number, label, merge, time.time())
        return number


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
        step |= {(part, key): None for key in new if key not in old}
        for key, row in old.items():
            now = new.get(key)
            if now is None:
                step[part, key] = row
            elif now is not row and (values := {name: row.get(name) for name in now if row.get(name) != now[name]}):
                step[part, key] = values
    return step


def applied(state: State, step: Step) -> State:
    """The content on the other side of a step."""
    tables = {part: dict(state[part]) for part in PARTS}
    for (part, key), values in step.items():
        now = tables[part].pop(key, {})
        if values is not None:
            tables[part][key] = {**now, **values}
    return {**state, **{part: in_order(table) for part, table in tables.items()}}


def waiting(state: State) -> list[str]:
    """The keys of captions from files that have no image."""
    return [key for key, text in state["texts"].items() if not text["used"]]


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
    with contextlib.suppress(RunError):  # a disk that takes nothing is reported by the next change
        _delete_unneeded(file)
    while len(_open) > MAX_OPEN:
        close(next(iter(_open)))
    return file


def _delete_unneeded(file: DraftFile) -> None:
    """Delete the images, masks and thumbnails that no content names which undo or redo can reach: what was removed long
    ago, and what a killed process left.

    Decision: such a content is reached from that of now by steps, so a file that it names is named now, or by a step. A
    file is put in place and named in one change, so none of this moment is without its name.
    """
    with file.transaction():
        of_files = (
            "SELECT value FROM undo WHERE part = 'images' AND (value LIKE '%\"stored\"%' OR value LIKE '%\"mask\"%')"
        )
        try:
            rows = [*file.state["images"].values(), *(json.loads(value) for (value,) in file.sql(of_files))]
        except ValueError:
            return  # a step that cannot be read may name any of them
        needed = {row[kind] for row in rows for kind in ("stored", "mask") if row.get(kind)}
        ids = {Path(name).stem for name in needed}  # a thumbnail begins with that of its image
        for place in ("images", "masks", "thumbs"):
            for path in (file.path.parent / place).glob("*"):
                if path.name not in needed and path.name.partition("-")[0] not in ids:
                    with contextlib.suppress(OSError):
                        path.unlink(missing_ok=True)


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


def memory(draft_id: str) -> dict[str, Any]:
    """What was computed from a draft's content, by name; it is lost when the draft leaves the memory."""
    with lock:
        return _file(draft_id).memory if (folder(draft_id) / NAME).exists() else {}


@contextlib.contextmanager
def locked(draft_id: str) -> Iterator[DraftFile]:
    """Keep other threads and processes from changing a draft. What the block stores is kept together when it ends."""
    with lock, (file := _file(draft_id)).transaction():
        yield file


@contextlib.contextmanager
def change(draft_id: str, merge: str = "", within_s: float = math.inf) -> Iterator["Edit"]:
    """Change a draft as one step that can be undone. The block changes `edit.state` and sets `edit.label`.

    Args:
        merge: steps with the same text that follow each other within `within_s` become one.
    """
    with locked(draft_id) as file:
        before = file.state
        edit = Edit({**before, **{part: dict(before[part]) for part in PARTS}})
        yield edit
        after = {**edit.state, **{part: placed(edit.state[part]) for part in PARTS}}
        of_images = [values for (part, _), values in difference(before, after).items() if part == "images"]
        if any(values is None or SHOWN & values.keys() for values in of_images) or waiting(before) != waiting(after):
            after["done"] = file.add_step(after, edit, merge, within_s)
        if after != before:
            file.store(after)


def undo(draft_id: str, back: bool = True) -> str | None:
    """Undo the last change of images or captions, or redo the one undone last; a sentence about it, None for no change."""
    with locked(draft_id) as file:
        number = file.state["done"] + (not back)
        if not (label := file.label(number)):
            return None
        before, step = file.state, file.step(number)
        after = applied(before, step)
        file.set_step(number, step, difference(before, after))
        file.store({**after, "done": number - back})
    return f"{'Undone' if back else 'Redone'}: {label}."


def history(draft_id: str) -> tuple[str, str]:
    """What undo would undo and redo would redo, such as "caption of cat.png"; "" for nothing."""
    with lock:
        if not (folder(draft_id) / NAME).exists():
            return "", ""
        file = _file(draft_id)
        done = file.refresh()["done"]
        return file.label(done), file.label(done + 1)


@dataclass
class Edit:
    """A change in progress. `label`: its name in the history, such as "caption of cat.png"; or what makes it of the
    number of images that it adds."""

    state: State
    label: str | Callable[[int], str] = "change"


def digest(state: State) -> str:
    """Hash of all images and captions; "" when there are none."""
    content = [[entry[name] for name in IN_A_RUN] for entry in state["images"].values()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest() if content else ""


def plain_text(text: Any) -> Any:
    """Text that UTF-8 can hold: a browser can send half of a character that takes two. Other values stay."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(text, str) else text
