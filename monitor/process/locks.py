"""OS file locks: one monitor a run, one run a GPU. The kernel releases them when the holder dies, by SIGKILL too.

A killed holder leaves a pid file behind, and a reused pid makes it look alive; hence `flock` (Windows:
`msvcrt.locking`). A run's folder can be deleted with the lock file in it, so `acquire` checks that the file it locked
is still at the path: else two processes could hold locks on two files of one name.
"""

import contextlib
import errno
import os
import random
import stat
import sys
import time
from pathlib import Path

LOCK = "monitor.lock"  # in a run's folder: held by its monitor
PROBE_S = 1.0  # how long `acquire` waits for those who only probe; a probe takes microseconds


class Lock:
    """An exclusive lock on a file, held until `release()` or the end of the process."""

    def __init__(self, path: Path, shared: bool = False):
        """shared: other accounts use it too, in a folder that everybody may write to."""
        self.path = path
        self._shared = shared
        self._handle: int | None = None

    def acquire(self, patience_s: float = 0.0) -> bool:
        """Take the lock; False when another process holds it for `patience_s` seconds. OSError: it cannot be made."""
        began_s = time.monotonic()
        while self._handle is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = _open_shared(self.path) if self._shared else os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                locked = _lock(handle)
                if locked and _is_at(handle, self.path):
                    self._handle = handle
                    break
                # Removed between our open and our lock, or only probed: a shared lock succeeds. Windows cannot tell.
                free = locked or sys.platform == "win32" or _lock(handle, shared=True)
            finally:
                if self._handle is None:
                    os.close(handle)
            if time.monotonic() - began_s >= (max(patience_s, PROBE_S) if free else patience_s):
                return False
            time.sleep(random.uniform(0.001, 0.02))  # uneven, so that two processes do not keep probing each other
        return True

    @property
    def handle(self) -> int:
        """The descriptor of the held lock: a process that inherits it holds the lock too."""
        if self._handle is None:
            raise RuntimeError(f"the lock {self.path} is not held")
        return self._handle

    def write(self, text: str) -> None:
        """Replace the text in the lock file. It only informs people, so a full disk is no error."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.handle, 0)
            os.lseek(self.handle, 0, os.SEEK_SET)
            os.write(self.handle, text.encode())

    def release(self) -> None:
        """Release the lock, when it is held."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            with contextlib.suppress(OSError):
                os.close(handle)


def _open_shared(path: Path) -> int:
    """Open the file of a lock that every account may take; made when missing. OSError: something else is in its place.

    Made and opened in two steps, because Linux (fs.protected_regular) refuses to open with O_CREAT what another account
    made in such a folder. A link there could lead to a file of ours, which must not be changed.
    """
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process was faster
            handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            if hasattr(os, "fchmod"):
                os.fchmod(handle, 0o666)  # whatever the umask says
            return handle
        return _open_shared(path)
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return handle
    os.close(handle)
    raise OSError(errno.EPERM, "is not the file of a lock; remove it", os.fspath(path))


def _lock(handle: int, shared: bool = False) -> bool:
    """Try to lock; False when somebody else's lock forbids it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(handle, 1 << 30, os.SEEK_SET)  # beyond the text, so that it can be read
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        raise
    return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        # Windows removes no file that is open.
        return sys.platform == "win32" or os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock; True when unknown, because a wrong "free" lets a second writer start."""
    try:
        handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
        try:
            return not _lock(handle, shared=True)
        finally:
            os.close(handle)
    except OSError as error:
        return error.errno != errno.ENOENT
