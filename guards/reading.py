"""Reads a file although the system lacks a descriptor or memory for a moment, or one that cannot be read as empty.

A scan of /proc or of a folder of checkpoints opens hundreds of files: if one error in fifty opens ended it, it would
never end well. A shortage that lasts is the caller's error, as ever.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
TRIES_COUNT = 3
MOVED = ("rchar", "wchar", "read_bytes", "write_bytes")
"""Bytes passed through read and write calls, and those of a disk again, which move within a long call."""


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file. Raises OSError; after three tries where it is a shortage."""
    tries_left = TRIES_COUNT
    while True:
        tries_left -= 1
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            if not tries_left or error.errno not in SHORTAGES:
                raise


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file, "" where it cannot be read; what is not UTF-8 is replaced."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """A JSON object from a file; None when the file is missing, incomplete or something else."""
    try:
        return json_object(Path(path).read_bytes())
    except OSError:
        return None


def json_object(text: bytes | str) -> dict[str, Any] | None:
    """The JSON object in a text; None when it is incomplete or something else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def moved_bytes(process: str, counters: tuple[str, ...] = MOVED) -> int | None:
    """The sum of these counters of /proc/PROCESS/io (`self`, `self/task/12`); None where they are not counted."""
    try:
        lines = [line.split(": ") for line in read_bytes(f"/proc/{process}/io").decode().splitlines()]
    except OSError:
        return None
    return sum(int(number) for name, number in lines if name in counters)


def boot_id() -> str:
    """A name for this boot, "" off Linux: then callers compare processes by (pid, start) alone.

    A boot time is no such name: it is computed from the wall clock, which moves.
    """
    try:
        return read_bytes("/proc/sys/kernel/random/boot_id").decode().strip()
    except OSError:
        return ""
