"""A place that is a folder: another disk, or a network share.

A file is written under a hidden name, fsynced and renamed. A new one is linked to its name instead, which fails where the
name exists (link(2)), also on NFS, where O_EXCL alone leaves an empty file for a moment. File systems without links get O_EXCL.
"""

import contextlib
import errno
import os
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.store.kind import Entry, Meter

BLOCK = 1 << 20
LEFT_S = 24 * 3600.0  # a hidden file older than this was left by a killed writer
REFUSALS = {
    errno.ENOSPC: "the disk is full; free some space there",
    errno.EDQUOT: "the disk quota is used up; free some space there",
    errno.EACCES: "no permission; fix the permissions of the folder",
    errno.EPERM: "no permission; fix the permissions of the folder",
    errno.EROFS: "the file system is read-only; use another folder",
    errno.ENOTDIR: "a file has the name of a folder; move the file, or use another folder",
}
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class FolderKind:
    """The files below `root`, which is created by the first write."""

    exclusive = True
    failures: tuple[type[Exception], ...] = ()

    def __init__(self, root: Path):
        self.root = root

    def prove(self, prefix: str) -> None:
        """The system's own calls are exclusive."""

    def size(self, name: str) -> int:
        """The size in bytes. Raises OSError."""
        with self._open(name) as handle:
            return os.fstat(handle).st_size

    def read(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`. Raises OSError."""
        with self._open(name) as handle:
            os.lseek(handle, start, os.SEEK_SET)
            data = b""
            while len(data) < length and (more := os.read(handle, length - len(data))):
                data += more
            return data

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[int]:
        """A file of the store, never one that a link points to."""
        handle = os.open(
            self.root / name,
            os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0),
        )
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise PermissionError(errno.EPERM, "not a plain file", name)
            yield handle
        finally:
            os.close(handle)

    def put(self, name: str, source: bytes | str, meter: Meter) -> None:
        """Replace a file. Raises OSError."""
        with self._written(name, source, meter) as temporary:
            os.replace(temporary, self.root / name)

    def create(self, name: str, data: bytes) -> None:
        """Write a new file. Raises FileExistsError, OSError."""
        path = self.root / name
        with self._written(name, data, lambda count: None) as temporary:
            try:
                os.link(temporary, path)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(handle)

    @contextlib.contextmanager
    def _written(self, name: str, source: bytes | str, meter: Meter) -> Iterator[Path]:
        """A temporary file beside `name` with the contents of `source`, on the disk; it is gone afterwards."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with open(temporary, "xb") as file:
                if isinstance(source, bytes):
                    file.write(source)
                    meter(len(source))
                else:
                    with open(source, "rb") as original:
                        while block := original.read(BLOCK):
                            file.write(block)
                            meter(len(block))
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
        if os.name != "nt":
            handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def list(self, prefix: str) -> dict[str, Entry]:
        """The files below the folder `prefix`. Removes what killed writers left a day ago. Raises OSError."""
        found = {}
        for where, folders, names in os.walk(self.root / prefix, onerror=_raise):
            folders[:] = [folder for folder in folders if folder[0] != "."]
            for name in names:
                path = Path(where) / name
                try:
                    status = os.lstat(path)
                except FileNotFoundError:
                    continue
                if name[0] != "." and stat.S_ISREG(status.st_mode):
                    found[path.relative_to(self.root).as_posix()] = Entry(status.st_size, status.st_mtime)
                elif name[0] == "." and status.st_mtime < time.time() - LEFT_S:
                    with contextlib.suppress(OSError):  # tried again by the next listing
                        path.unlink()
        return found

    def folders(self, prefix: str) -> Sequence[str]:
        """The folders directly in `prefix`. Raises OSError."""
        try:
            with os.scandir(self.root / prefix) as rows:
                return [row.name for row in rows if row.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def delete(self, names: Sequence[str]) -> None:
        """Delete files. Raises OSError."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.root / name)

    def refusal(self, error: Exception) -> str:
        """Why repeating cannot help; "" where it may."""
        return REFUSALS.get(error.errno or 0, "") if isinstance(error, OSError) else ""

    def reset(self) -> None:
        """Nothing is kept open."""


def _raise(error: OSError) -> None:
    """What cannot be listed is an error, but a folder that does not exist has no files."""
    if not isinstance(error, FileNotFoundError):
        raise error
