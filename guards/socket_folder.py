"""Keeps the sockets of loader workers within the length that the system allows.

A worker hands its tensors over by a socket named TMPDIR/pymp-12345678/listener-12345678. When that path is too long,
the worker loses each batch, prints an error that nobody links to TMPDIR, and the trainer waits. TMPDIR itself stays as
it is, because large temporary files belong on the disk that the user chose: only the folder of the sockets moves.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import tempfile

NAMES = len("/pymp-12345678/listener-12345678")
LIMIT = 107 if sys.platform == "linux" else 103
"""Bytes of a socket's path (sun_path without its final zero)."""
SHORT = ("/tmp", "/var/tmp", "/dev/shm")


class TooLong(RuntimeError):
    """TMPDIR is too long, and no other folder can be used; the message says what to do."""


def fits(folder: str) -> bool:
    """Return True when sockets in a temporary folder have paths that the system accepts."""
    return os.name == "nt" or len(os.fsencode(folder)) + NAMES <= LIMIT


def choose() -> str:
    """Move the sockets of this process and its workers out of a TMPDIR that is too long. Raises TooLong.

    Returns a line for the log, "" when TMPDIR is short enough.
    """
    given = tempfile.gettempdir()
    if fits(given):
        return ""
    before = tempfile.tempdir
    for folder in filter(fits, SHORT):
        tempfile.tempdir = folder
        try:
            made = multiprocessing.util.get_temp_dir()  # workers inherit it; removed at exit
        except OSError:
            continue
        finally:
            tempfile.tempdir = before
        return f"TMPDIR ({given}) is too long for the sockets of loader workers; they are in {made}"
    raise TooLong(
        f"TMPDIR ({given}) is {len(os.fsencode(given))} bytes long, and loader workers need at most {LIMIT - NAMES} "
        f"for their sockets; {', '.join(SHORT)} cannot be used either. Set TMPDIR to a shorter folder, then start again"
    )
