"""The end of a log as it grows; stamps that tell whether a file changed, and what is kept of a file until it does."""

import os
import time
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from runs.growing import LINE_BYTES, Added

LOG_BYTES = 2 << 20  # of a log that is opened, its last ones
LOG_LINES = 1000
YOUNG_NS = 2_000_000_000
KEPT = 20_000  # values
T = TypeVar("T")


class Stamp(NamedTuple):
    """What changes when a file or folder changes; all zero for a missing one."""

    inode: int
    size: int
    mtime_ns: int


def stamp(path: str | os.PathLike[str]) -> Stamp:
    """The stamp of a file or folder."""
    try:
        found = os.stat(path)
    except OSError:
        return Stamp(0, 0, 0)
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


_kept: dict[Hashable, tuple[tuple[Stamp, ...], Any]] = {}  # stamps, value; the ones used last are at the end


def kept(name: str, key: Path, files: Iterable[Path], make: Callable[[], T], young: bool = False) -> T:
    """What `make` returns, made again only after one of the `files` that it reads has changed.

    young: also make it again while a file changed a moment ago, because file systems count in coarse ticks: of a folder, a
    further change may have the same stamp.
    """
    stamps = tuple(map(stamp, files))
    known = _kept.pop((name, key), None)
    fresh = young and any(abs(time.time_ns() - one.mtime_ns) < YOUNG_NS for one in stamps)
    if known is None or fresh or known[0] != stamps:
        known = stamps, make()
    _kept[name, key] = known
    while len(_kept) > KEPT:
        _kept.pop(next(iter(_kept)), None)
    return known[1]


class LogEnd:
    """The last lines of a log, the one that is being written too. Each update reads only what was added."""

    def __init__(self, path: Path):
        self._added = Added(path)
        self._end = b""

    def update(self) -> bytes:
        """The lines as they are now."""
        data, new = self._added.read(LOG_BYTES, skip_to_end=True)
        if data or new:
            lines = ((b"" if new else self._end) + data).split(b"\n")[-LOG_LINES:]
            self._end = b"\n".join(last_state(line)[-LINE_BYTES:] for line in lines)
        return self._end


def last_state(line: bytes) -> bytes:
    """Of a progress bar, which can grow for hours without a line end, what a terminal shows now."""
    return line[line.rfind(b"\r", 0, len(line.rstrip(b"\r"))) + 1 :]
