"""The log of a run as it grows, and stamps that tell whether a file changed.

A log can be large when it is opened: one read takes READ_BYTES at most (runs/growing.py), so that no tick of the page waits for all of it.
"""

import os
import re
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from runs.env_file import masking
from runs.growing import LINE_BYTES, Added
from runs.metrics_lines import entries
from ui.html import ANSI

LOG_LINES = 300
HEADER = re.compile(r"=== (\S+) attempt (\d+): ")  # monitor/attempt.py writes it before each attempt
USAGE_ERROR = re.compile(r"(?:\S+: )?error: \S")
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception): \S")
LAUNCHER_ERRORS = ("subprocess.CalledProcessError:", "torch.distributed.")
TRACEBACK = "Traceback (most recent call last):"
LAUNCHER_FRAME = re.compile(r'\s*File ".*[/\\]accelerate[/\\]commands[/\\]')
COLOUR = re.compile(r"\x1b\[[0-9;]{0,40}m")
LOG_BYTES = 2 << 20  # of a log that is opened, its last ones
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


# The log --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Log:
    """The end of a log. `hidden`: lines of the launcher's tracebacks after a stop, left out of `text`.

    `styled`: the same lines with a terminal's colour codes.

    `error`: the line of the last attempt that says what went wrong, "" without one: a usage error, else the first exception.
    """

    text: str = ""
    hidden: int = 0
    error: str = ""
    styled: tuple[str, ...] = ()


class LogTail:
    """The last lines of `training.log` as a terminal shows them."""

    def __init__(self, path: Path, events: Path):
        self._added, self._events = Added(path), Added(events)
        self._stops: list[str] = []  # times at which a stop began
        self._begin()

    def _begin(self) -> None:
        self._partial = b""
        # (line, when its attempt started, the line with colours)
        self._lines: deque[tuple[str, str, str]] = deque(maxlen=LOG_LINES)
        self._attempts: list[str] = [""]
        self._usage = self._exception = ""
        self._log: Log | None = None

    def update(self) -> Log:
        """Read what was added; the same object as before when that is nothing."""
        stopped = self._read_events()
        data, new = self._added.read(LOG_BYTES, skip_to_end=True)
        if new:
            self._begin()
        if not data and not stopped and self._log is not None:
            return self._log
        *lines, partial = (self._partial + data).split(b"\n")
        masked = masking(self._added.path.parent)
        for line in lines:
            self._take(masked(line))
        # Of a progress bar only the last state is kept: it can grow for hours without a line end.
        end = len(partial.rstrip(b"\r"))
        self._partial = partial[partial.rfind(b"\r", 0, end) + 1 :][-LINE_BYTES:]
        self._log = self._drawn(masked(self._partial))
        return self._log

    def _take(self, data: bytes) -> None:
        line = plain_line(data)
        if match := HEADER.match(line):
            self._attempts.append(match[1])
            self._usage = self._exception = ""
        elif not self._usage and USAGE_ERROR.match(line):
            self._usage = line
        elif not self._exception and EXCEPTION.match(line) and not line.startswith(LAUNCHER_ERRORS):
            self._exception = line
        self._lines.append((line, self._attempts[-1], styled_line(data)))

    def _read_events(self) -> bool:
        data, new = self._events.read()
        if new:
            self._stops = []
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        found = [e.get("t") for e in entries(lines) if e.get("kind") == "stopping"]
        self._events.offset -= len(data) - (data.rfind(b"\n") + 1)  # an unfinished line is read next time
        self._stops += [t for t in found if isinstance(t, str)]
        return bool(found)

    def _stopped(self, attempt: str) -> bool:
        """Whether a stop began during the attempt that started at this time. UTC times in one format sort as text."""
        later = [start for start in self._attempts if start > attempt]
        return any(attempt <= stop and (not later or stop < min(later)) for stop in self._stops)

    def _drawn(self, partial: bytes) -> Log:
        lines = [*self._lines, (plain_line(partial), self._attempts[-1], styled_line(partial))][-LOG_LINES:]
        stopped = {attempt: self._stopped(attempt) for attempt in {attempt for _, attempt, _ in lines}}
        kept: list[str] = []
        styled: list[str] = []
        hidden = index = 0
        while index < len(lines):
            line, attempt, coloured = lines[index]
            end = _launcher_block(lines, index) if line == TRACEBACK and stopped[attempt] else index
            if end > index:
                hidden, index = hidden + end - index, end
            else:
                kept.append(line)
                styled.append(coloured)
                index += 1
        text = "\n".join(kept).strip("\n")
        while styled and not styled[-1]:
            styled.pop()
        return Log(text, hidden, self._usage or self._exception, tuple(styled))


def _launcher_block(lines: list[tuple[str, str, str]], start: int) -> int:
    """The end of the traceback that begins at `start` when it is accelerate's own; else `start`."""
    end = start + 1
    while end < len(lines) and lines[end][0][:1] in (" ", "\t"):
        end += 1
    ours = any(LAUNCHER_FRAME.match(line) for line, _, _ in lines[start + 1 : end])
    return min(end + 1, len(lines)) if ours else start  # with the line of the exception


def plain_line(line: bytes) -> str:
    """A line as a terminal shows it: no escape codes, of a progress bar only its last state."""
    text = ANSI.sub("", line.decode("utf-8", "replace")).rstrip("\r").rsplit("\r", 1)[-1]
    return text if text.isprintable() else "".join(c for c in text if c == "\t" or c.isprintable())


def styled_line(line: bytes) -> str:
    """`plain_line` with the codes of a terminal's colours. The browser makes them styles; no other control character is left."""
    if b"\x1b" not in line:
        return plain_line(line)
    text = line.decode("utf-8", "replace").rstrip("\r").rsplit("\r", 1)[-1]
    codes = [code[0] for code in COLOUR.finditer(text)]
    parts = COLOUR.split(text)
    out = [plain_line(parts[0].encode("utf-8", "replace"))]
    for code, part in zip(codes, parts[1:], strict=True):
        out += [code, plain_line(part.encode("utf-8", "replace"))]
    return "".join(out)
