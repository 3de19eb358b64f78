"""Reads a file although the system lacks a descriptor or memory for a moment.

A scan of /proc or of a folder of checkpoints opens hundreds of files: if one error in fifty opens ended it, it would
never end well. A shortage that lasts is the caller's error, as ever.
"""

from __future__ import annotations

import errno
import os

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
TRIES_COUNT = 3


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file. Raises OSError; after three tries where it is a shortage."""
    for _ in range(TRIES_COUNT - 1):
        try:
            return _read(path)
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
    return _read(path)


def boot_id() -> str:
    """The id of this boot of the machine; "" where there is none."""
    try:
        return read_bytes("/proc/sys/kernel/random/boot_id").decode("ascii").strip()
    except OSError:
        return ""


def _read(path: str | os.PathLike[str]) -> bytes:
    with open(path, "rb") as file:
        return file.read()
