"""Readers of growing files: each update reads only what was added since the last one.

A million lines of `metrics.jsonl` are 150 MB: the first reads take READ_BYTES each, so that no tick of the page waits for
all of them. Losses are kept by step in one array of numpy, which Gradio has loaded anyway.
"""

import json
import math
import os
import re
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ui.html import ANSI

READ_BYTES = 8 << 20
MAX_STEP = 10_000_000  # a larger number in a file is not a step
LOG_LINES = 300
LINE_BYTES = 64 * 1024  # of an unfinished line
HEADER = re.compile(r"=== (\S+) attempt \d+: ")  # monitor/attempt.py writes it before each attempt
USAGE_ERROR = re.compile(r"(?:\S+: )?error: \S")
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception): \S")
LAUNCHER_ERRORS = ("subprocess.CalledProcessError:", "torch.distributed.")
TRACEBACK = "Traceback (most recent call last):"
LAUNCHER_FRAME = re.compile(r'\s*File ".*[/\\]accelerate[/\\]commands[/\\]')
YOUNG_NS = 2_000_000_000


class Stamp(NamedTuple):
    """What changes when a file or folder changes; all zero for a missing one."""

    inode: int
    size: int
    mtime_ns: int

    @property
    def young(self) -> bool:
        """Changed a moment ago: a further change may have the same stamp, because file systems count in coarse ticks."""
        return abs(time.time_ns() - self.mtime_ns) < YOUNG_NS


def stamp(path: str | os.PathLike[str]) -> Stamp:
    """The stamp of a file or folder."""
    try:
        found = os.stat(path)
    except OSError:
        return Stamp(0, 0, 0)
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


class Added:
    """The bytes that were added to a file."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self.size = 0
        self._inode: int | None = None

    def read(self, limit: int = READ_BYTES, skip_to_end: bool = False) -> tuple[bytes, bool]:
        """(the next bytes, at most `limit`; whether the file is another one or was truncated: start over).

        skip_to_end: of more than `limit` bytes, read the last ones.
        """
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                new = found.st_ino != self._inode or found.st_size < self.offset
                if new:
                    self.offset, self._inode = 0, found.st_ino
                self.size = found.st_size
                if self.size == self.offset:
                    return b"", new
                if skip_to_end:
                    self.offset = max(self.offset, self.size - limit)
                file.seek(self.offset)
                data = file.read(limit)
        except OSError:
            return b"", False
        self.offset += len(data)
        return data, new


# Losses ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Curve:
    """Loss by step: `values[step]`, NaN where there is none. `share`: how much of the file was read so far, 0 to 1."""

    values: np.ndarray
    share: float = 1.0

    @classmethod
    def of(cls, losses: dict[int, float]) -> "Curve":
        """A curve from {step: loss}."""
        values = _empty(max(losses, default=-1) + 1)
        for step, loss in losses.items():
            values[step] = loss
        return cls(values)

    def by_step(self) -> dict[int, float]:
        """{step: loss} of the steps with a finite loss."""
        return {int(step): float(self.values[step]) for step in np.flatnonzero(np.isfinite(self.values))}


def _empty(length: int) -> np.ndarray:
    return np.full(length, math.nan, np.float32)


class Losses:
    """The losses in a run's `metrics.jsonl`. Of a step that was repeated after a restart, the last line counts."""

    def __init__(self, path: Path):
        self._added = Added(path)
        self._rest = b""
        self._values = _empty(1024)
        self._end = 0
        self._curve = Curve(self._values[:0])

    def update(self) -> Curve:
        """Read what was added, at most READ_BYTES; the same object as before when that is nothing."""
        data, new = self._added.read()
        if new:
            self._rest, self._end = b"", 0
            self._values = _empty(1024)
        if not data and not new:
            return self._curve
        data = self._rest + data
        complete = data.rfind(b"\n") + 1  # an unfinished last line is read next time
        self._rest = data[complete:][-LINE_BYTES:]
        for entry in _entries(data[:complete]):
            step, loss = entry.get("step"), entry.get("loss")
            if entry.get("kind") == "step" and type(step) is int and 0 <= step <= MAX_STEP:
                self._set(step, loss if isinstance(loss, int | float) else math.nan)
        share = self._added.offset / self._added.size if self._added.size else 1.0
        self._curve = Curve(self._values[: self._end].copy(), share)
        return self._curve

    def _set(self, step: int, loss: float) -> None:
        if step >= len(self._values):
            larger = _empty(max(step + 1, 2 * len(self._values)))
            larger[: len(self._values)] = self._values
            self._values = larger
        self._values[step] = loss if abs(loss) < 1e30 else math.nan
        self._end = max(self._end, step + 1)


def _entries(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects of complete lines. All at once, which is four times faster; one by one where a line is invalid."""
    lines = data.splitlines()
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return [entry for entry in found if isinstance(entry, dict)]


# The log --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Log:
    """The end of a log. `hidden`: lines of the launcher's tracebacks after a stop, left out of `text`.

    `error`: the line of the last attempt that says what went wrong, "" without one: a usage error, else the first exception.
    """

    text: str = ""
    hidden: int = 0
    error: str = ""


class LogTail:
    """The last lines of `training.log` as a terminal shows them."""

    def __init__(self, path: Path, events: Path):
        self._added, self._events = Added(path), Added(events)
        self._stops: list[str] = []  # times at which a stop began
        self._begin()

    def _begin(self) -> None:
        self._partial = b""
        self._lines: deque[tuple[str, str]] = deque(maxlen=LOG_LINES)  # (line, when its attempt started)
        self._attempts: list[str] = [""]
        self._usage = self._exception = ""
        self._log: Log | None = None

    def update(self) -> Log:
        """Read what was added; the same object as before when that is nothing."""
        stopped = self._read_events()
        data, new = self._added.read(skip_to_end=True)
        if new:
            self._begin()
        if not data and not stopped and self._log is not None:
            return self._log
        *lines, partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._take(plain_line(line))
        # Of a progress bar only the last state is kept: it can grow for hours without a line end.
        end = len(partial.rstrip(b"\r"))
        self._partial = partial[partial.rfind(b"\r", 0, end) + 1 :][-LINE_BYTES:]
        self._log = self._drawn()
        return self._log

    def _take(self, line: str) -> None:
        if match := HEADER.match(line):
            self._attempts.append(match[1])
            self._usage = self._exception = ""
        elif not self._usage and USAGE_ERROR.match(line):
            self._usage = line
        elif not self._exception and EXCEPTION.match(line) and not line.startswith(LAUNCHER_ERRORS):
            self._exception = line
        self._lines.append((line, self._attempts[-1]))

    def _read_events(self) -> bool:
        data, new = self._events.read()
        if new:
            self._stops = []
        found = [e.get("t") for e in _entries(data[: data.rfind(b"\n") + 1]) if e.get("kind") == "stopping"]
        self._events.offset -= len(data) - (data.rfind(b"\n") + 1)  # an unfinished line is read next time
        self._stops += [t for t in found if isinstance(t, str)]
        return bool(found)

    def _stopped(self, attempt: str) -> bool:
        """Whether a stop began during the attempt that started at this time. UTC times in one format sort as text."""
        later = [start for start in self._attempts if start > attempt]
        return any(attempt <= stop and (not later or stop < min(later)) for stop in self._stops)

    def _drawn(self) -> Log:
        lines = [*self._lines, (plain_line(self._partial), self._attempts[-1])][-LOG_LINES:]
        stopped = {attempt: self._stopped(attempt) for attempt in {attempt for _, attempt in lines}}
        kept: list[str] = []
        hidden = index = 0
        while index < len(lines):
            line, attempt = lines[index]
            end = _launcher_block(lines, index) if line == TRACEBACK and stopped[attempt] else index
            if end > index:
                hidden, index = hidden + end - index, end
            else:
                kept.append(line)
                index += 1
        return Log("\n".join(kept).strip("\n"), hidden, self._usage or self._exception)


def _launcher_block(lines: list[tuple[str, str]], start: int) -> int:
    """The end of the traceback that begins at `start` when it is accelerate's own; else `start`."""
    end = start + 1
    while end < len(lines) and lines[end][0][:1] in (" ", "\t"):
        end += 1
    ours = any(LAUNCHER_FRAME.match(line) for line, _ in lines[start + 1 : end])
    return min(end + 1, len(lines)) if ours else start  # with the line of the exception


def plain_line(line: bytes) -> str:
    """A line as a terminal shows it: no escape codes, of a progress bar only its last state."""
    text = ANSI.sub("", line.decode("utf-8", "replace")).rstrip("\r").rsplit("\r", 1)[-1]
    return text if text.isprintable() else "".join(c for c in text if c == "\t" or c.isprintable())
