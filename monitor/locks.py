"""OS file locks: one monitor a run, one run a GPU. The kernel releases them when the holder dies, by SIGKILL too.

Decision: `flock` (Windows: `msvcrt.locking`) rather than a pid file, which a killed holder leaves behind and a reused pid
makes look alive. A lock file is never deleted: two processes could then hold locks on two files of the same name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from monitor.system import WINDOWS

LOCK = "monitor.lock"  # in a run's folder: held by its monitor
_BUSY = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)


class Lock:
    """An exclusive lock on a file, held until `release()` or the end of the process."""

    def __init__(self, path: Path):
        self.path = path
        self._handle: int | None = None

    def acquire(self, patience_s: float = 0.0) -> bool:
        """Take it; False when another process holds it for longer than `patience_s` seconds. OSError: cannot be made."""
        if self._handle is not None:
            return True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        until = time.monotonic() + patience_s
        while not _lock(handle):
            if time.monotonic() >= until:
                os.close(handle)
                return False
            time.sleep(0.02)
        self._handle = handle
        return True

    @property
    def handle(self) -> int:
        """The descriptor of a held lock: a process that inherits it holds the lock too."""
        return self._handle

    def write(self, text: str) -> None:
        """Leave a word in the lock file for people and for `held_by`."""
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, text.encode(), 0) if hasattr(os, "pwrite") else os.write(self._handle, text.encode())

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _lock(handle: int) -> bool:
    try:
        if WINDOWS:
            import msvcrt

            os.lseek(handle, 1 << 30, os.SEEK_SET)  # beyond the text, so that it can be read
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


def is_held(path: Path) -> bool:
    """Does a living process hold the lock at `path`? Asks by a shared lock, which it gives back at once."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        if WINDOWS:
            return not _lock(handle)
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                return True
            raise
        return False
    finally:
        with contextlib.suppress(OSError):
            os.close(handle)
