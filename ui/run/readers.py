"""The log of a run as it grows, and stamps that tell whether a file changed.

A log can be large when it is opened: one read takes READ_BYTES at most (runs/growing.py), so that no tick of the page waits for all of it.
"""

import os
import re
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from runs.env_file import masking
from runs.growing import LINE_BYTES, Added
from ui.html import ANSI

LOG_LINES = 300
HEADER = re.compile(r"=== (\S+) attempt (\d+): ")  # monitor/attempt.py writes it before each attempt
USAGE_ERROR = re.compile(r"(?:\S+: )?error: \S")
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception): \S")
LAUNCHER_ERRORS = ("subprocess.CalledProcessError:", "torch.distributed.")
COLOUR = re.compile(r"\x1b\[[0-9;]{0,40}m")
LOG_BYTES = 2 << 20  # of a log that is opened, its last ones
YOUNG_NS = 2_000_000_000
KEPT = 20_000  # values
T = TypeVar("T")


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


_kept: dict[Hashable, tuple[tuple[Stamp, ...], Any]] = {}  # stamps, value; the ones used last are at the end


def kept(name: str, key: Path, files: Iterable[Path], make: Callable[[], T]) -> T:
    """What `make` returns, made again only after one of the `files` that it reads has changed."""
    stamps = tuple(map(stamp, files))
    known = _kept.pop((name, key), None)
    if known is None or known[0] != stamps:
        known = stamps, make()
    _kept[name, key] = known
    while len(_kept) > KEPT:
        _kept.pop(next(iter(_kept)), None)
    return known[1]


# The log --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Log:
    """The end of a log: its lines with a terminal's colour codes.

    `error`: the line of the last attempt that says what went wrong, "" without one: a usage error, else the first exception.
    """

    lines: tuple[str, ...] = ()
    error: str = ""


class LogTail:
    """The last lines of `training.log` as a terminal shows them."""

    def __init__(self, path: Path):
        self._added = Added(path)
        self._begin()

    def _begin(self) -> None:
        self._partial = b""
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._usage = self._exception = ""
        self._log: Log | None = None

    def update(self) -> Log:
        """Read what was added; the same object as before when that is nothing."""
        data, new = self._added.read(LOG_BYTES, skip_to_end=True)
        if new:
            self._begin()
        if not data and self._log is not None:
            return self._log
        *lines, partial = (self._partial + data).split(b"\n")
        masked = masking(self._added.path.parent)
        for line in lines:
            self._take(masked(line))
        # Of a progress bar only the last state is kept: it can grow for hours without a line end.
        end = len(partial.rstrip(b"\r"))
        self._partial = partial[partial.rfind(b"\r", 0, end) + 1 :][-LINE_BYTES:]
        end_of_log = [*self._lines, styled_line(masked(self._partial))]
        while end_of_log and not end_of_log[-1]:
            end_of_log.pop()
        self._log = Log(tuple(end_of_log[-LOG_LINES:]), self._usage or self._exception)
        return self._log

    def _take(self, data: bytes) -> None:
        line = plain_line(data)
        if HEADER.match(line):
            self._usage = self._exception = ""
        elif not self._usage and USAGE_ERROR.match(line):
            self._usage = line
        elif not self._exception and EXCEPTION.match(line) and not line.startswith(LAUNCHER_ERRORS):
            self._exception = line
        self._lines.append(styled_line(data))


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
