"""A draft's file: an SQLite database with its images, captions, form values and undo steps, and their copy in memory.

A change writes only the rows that differ, in one transaction, so that a caption among 10,000 costs one row and not a
file of several megabytes. SQLite's write-ahead log makes a change complete or absent after a kill or a power cut, and
lets the processes that caption and import write to a draft that the page shows. Rows are JSON.
"""

import contextlib
import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runs.files import REASONS, RunError
from ui.dataset import draft_history

NAME = "draft.sqlite"
BUSY_S = 60.0  # how long a change waits for that of another process
PARTS = draft_history.PARTS
META: dict[str, Any] = {"form": {}, "kept": "", "refused": {}, "done": 0}
# What a new image has. crop: left, top, right, bottom as fractions of the upright, rotated
# image; mask: the name of a file of the draft; weight: 1 to 10; caption_by: "person", "file", "model" or "".
FIELDS: dict[str, Any] = {"crop": None, "mask": None, "weight": 1, "caption_by": ""}
SCHEMA = """
CREATE TABLE images (key TEXT PRIMARY KEY, position REAL NOT NULL, revision INTEGER NOT NULL, value TEXT NOT NULL);
CREATE TABLE texts (key TEXT PRIMARY KEY, position REAL NOT NULL, revision INTEGER NOT NULL, value TEXT NOT NULL);
CREATE INDEX images_order ON images (position, key);
CREATE INDEX images_revision ON images (revision);
CREATE INDEX texts_order ON texts (position, key);
CREATE INDEX texts_revision ON texts (revision);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE steps (n INTEGER PRIMARY KEY, label TEXT NOT NULL, merge TEXT NOT NULL, at REAL NOT NULL, step BLOB NOT NULL);
PRAGMA user_version = 1;
"""
MIN_GAP = 1e-6  # between two positions; below it all are numbered again
State = dict[str, Any]


def empty() -> State:
    """A draft without anything."""
    return {"images": {}, "texts": {}, **META, "history": []}


class DraftFile:
    """The open file of one draft. One thread uses it at a time.

    state: its content; replaced and never changed, so that a caller can keep it.
    """

    def __init__(self, path: Path):
        """Open a file, and create it where it is missing.

        Raises:
            RunError: it is damaged, or the disk does not take it.
        """
        self.path, self.state, self.inode = path, empty(), 0
        self.revision = self.version = -1
        self.positions: dict[str, dict[str, float]] = {part: {} for part in PARTS}
        with self.explained():
            self.db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with self.explained():
                self.db.execute("PRAGMA journal_mode=WAL")  # stays a rollback journal where shared memory is missing
                self.db.execute("PRAGMA synchronous=FULL")
                if not self._has_tables():
                    self._create()
                self.inode = path.stat().st_ino
                self.refresh()
        except BaseException:
            self.db.close()
            raise

    def _has_tables(self) -> bool:
        return bool(self.db.execute("PRAGMA user_version").fetchone()[0])

    def _create(self) -> None:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            if not self._has_tables():  # else another process has just created it
                for statement in filter(str.strip, SCHEMA.split(";")):
                    self.db.execute(statement)
                self.revision = 0
                self._write(empty(), {})
            self.db.execute("COMMIT")
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.state, self.revision = empty(), -1
        self.positions = {part: {} for part in PARTS}

    def close(self) -> None:
        """Close the file."""
        self.db.close()

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an error of the database into a RunError that says what to do."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_FULL:
                raise RunError(f"cannot store your changes ({self.path}): {REASONS[28]}") from error
            if code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise RunError(f"{self.path} has been in use for {BUSY_S:.0f} s; try again") from error
            if code is not None and code & 0xFF in (
                sqlite3.SQLITE_IOERR,
                sqlite3.SQLITE_READONLY,
                sqlite3.SQLITE_CANTOPEN,
            ):
                advice = "check that the disk has space, and that the folder can be written"
                raise RunError(f"cannot store your changes ({self.path}): {error}; {advice}") from error
            advice = "move it to another folder, then reload the page"
            raise RunError(f"{self.path} cannot be read ({error}); {advice}") from error

    # Reading ---------------------------------------------------------------------------------------------------------

    def refresh(self) -> State:
        """The content, read again where another process changed it."""
        with self.explained():
            version = self.db.execute("PRAGMA data_version").fetchone()[0]
            if version == self.version and self.revision >= 0:
                return self.state
            joins = not self.db.in_transaction
            if joins:
                self.db.execute("BEGIN")  # all tables are read as of one moment
            try:
                found = self._meta()
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

    def _meta(self) -> dict[str, Any]:
        return {"revision": 0, **{key: json.loads(value) for key, value in self.db.execute("SELECT * FROM meta")}}

    def _rows(self, part: str) -> dict[str, Any]:
        """A table in its order. Only rows that changed since the last time are parsed."""
        places = dict(self.db.execute(f"SELECT key, position FROM {part} ORDER BY position, key"))
        self.positions = {**self.positions, part: places}
        rows = self.db.execute(f"SELECT key, value FROM {part} WHERE revision > ?", (self.revision,)).fetchall()
        values = json.loads(f"[{','.join(value for _, value in rows)}]")
        changed = {key: value for (key, _), value in zip(rows, values, strict=True)}
        old = self.state[part]
        return {key: changed[key] if key in changed else old[key] for key in self.positions[part]}

    def step(self, number: int) -> draft_history.Step:
        """A step of the history. Raises RunError: it cannot be read."""
        with self.explained():
            row = self.db.execute("SELECT step FROM steps WHERE n = ?", (number,)).fetchone()
        try:
            found: draft_history.Step = json.loads(zlib.decompress(row[0]))
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
        before = self.state, self.revision, self.positions
        try:
            self.refresh()
            before = self.state, self.revision, self.positions
            yield
            with self.explained():
                self.db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self.db.execute("ROLLBACK")
            self.state, self.revision, self.positions = before
            raise

    def store(self, state: State, steps: Mapping[int, draft_history.Step]) -> None:
        """Store a content, in the transaction that the caller began, with the steps that are new in its history."""
        with self.explained():
            self._write(state, steps)

    def _write(self, state: State, steps: Mapping[int, draft_history.Step]) -> None:
        before, revision = self.state, self.revision + 1
        for part in PARTS:
            self._write_rows(part, before[part], state[part], revision)
        for key in META:
            if state[key] != before[key] or revision == 1:
                self._write_meta(key, state[key])
        numbers = {one["n"] for one in state["history"]}
        self.db.executemany(
            "DELETE FROM steps WHERE n = ?", [(one["n"],) for one in before["history"] if one["n"] not in numbers]
        )
        rows = [
            (one["n"], one["label"], one["merge"], one["at"], zlib.compress(json.dumps(steps[one["n"]]).encode(), 1))
            for one in state["history"]
            if one["n"] in steps
        ]
        self.db.executemany("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)", rows)
        self._write_meta("revision", revision)
        self.state, self.revision = state, revision

    def _write_meta(self, key: str, value: Any) -> None:
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def _write_rows(self, part: str, before: dict[str, Any], after: dict[str, Any], revision: int) -> None:
        if after is before:
            return
        gone = [(key,) for key in before if key not in after]
        self.db.executemany(f"DELETE FROM {part} WHERE key = ?", gone)
        moved = new_positions(self.positions[part], list(after))
        positions = {**self.positions[part], **moved}
        changed = [
            (key, positions[key], revision, json.dumps(value))
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
        known: the positions stored now, in their order.
    """
    wanted = set(order)
    old = [key for key in known if key in wanted]
    now = [key for key in order if key in known]
    first, last = 0, len(now)
    while first < last and old[first] == now[first]:
        first += 1
    while last > first and old[last - 1] == now[last - 1]:
        last -= 1
    moved = set(now[first:last])
    found: dict[str, float] = {}
    gap: list[str] = []
    left: float | None = None
    for key in [*order, None]:
        if key is not None and (key not in known or key in moved):
            gap.append(key)
            continue
        right = None if key is None else known[key]
        if gap:
            low = left if left is not None else (right if right is not None else 0.0) - len(gap) - 1
            step = 1.0 if right is None else (right - low) / (len(gap) + 1)
            if step < MIN_GAP:
                return {each: float(number) for number, each in enumerate(order)}
            found |= {each: low + step * (number + 1) for number, each in enumerate(gap)}
            gap = []
        left = right
    return found
