"""Stamps that tell whether a file changed, what is kept of a file until it does, and the end of a file."""

import os
import time
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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


_kept: dict[Hashable, tuple[tuple[Any, ...], Any]] = {}  # what it was made of, value; the ones used last are at the end


def kept(name: str, key: Path, files: Iterable[Path], make: Callable[[], T], young: bool = False) -> T:
    """What `make` returns, made again only after one of the `files` that it reads has changed.

    young: also make it again while a file changed a moment ago, because file systems count in coarse ticks: of a
    folder, a further change may have the same stamp.
    """
    stamps = tuple(map(stamp, files))
    fresh = young and any(abs(time.time_ns() - one.mtime_ns) < YOUNG_NS for one in stamps)
    return latest(name, key, stamps, make, fresh)


def latest(name: str, key: Path | None, given: tuple[Any, ...], make: Callable[[], T], fresh: bool = False) -> T:
    """What `make` returns, made again only when `given`, what it is made of, is another than before, or `fresh`."""
    known = _kept.pop((name, key), None)
    if known is None or fresh or known[0] != given:
        known = given, make()
    _kept[name, key] = known
    while len(_kept) > KEPT:
        _kept.pop(next(iter(_kept)), None)
    return known[1]


def end_of(path: Path, most: int) -> bytes:
    """The last bytes of a file; b"" where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read(most)
    except OSError:
        return b""
