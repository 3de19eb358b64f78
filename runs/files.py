"""Put files on disk whole or not at all.

A file is written to a temporary name in its own folder, fsynced, renamed; a folder is built beside its place and renamed.
Whatever interrupts (a full disk, Ctrl-C, bad input), the old state stays.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


class RunError(Exception):
    """Something a person can put right: says what is wrong, where, and what to do."""


REASONS = {
    errno.ENOSPC: "the disk is full; free some space and try again",
    errno.EDQUOT: "your disk quota is used up; free some space and try again",
    errno.EACCES: "no permission to write there; fix the folder's permissions, or set HANGPROOF_DATA to one of yours",
    errno.EPERM: "no permission to write there; fix the folder's permissions, or set HANGPROOF_DATA to one of yours",
    errno.EROFS: "the file system is read-only; set HANGPROOF_DATA to a folder on another one",
    errno.ENOTDIR: "a file is in the way of the folder; move it aside, or set HANGPROOF_DATA to another folder",
    errno.EEXIST: "a file is in the way of the folder; move it aside, or set HANGPROOF_DATA to another folder",
    errno.ENAMETOOLONG: "the path is too long; choose a shorter name or a shorter HANGPROOF_DATA",
    errno.ENOENT: "the folder is gone; make it again, or set HANGPROOF_DATA to one that exists",
}


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an OSError inside into a RunError that says what could not be done, where, why, and what to do."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        reason = REASONS.get(error.errno) or error.strerror or str(error)
        raise RunError(f"cannot {what}{where}: {reason}") from error


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut; where a folder cannot be opened (Windows) there is nothing to do."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_write(path: Path, content: str | bytes, executable: bool = False) -> None:
    """Replace `path` by `content` (text as UTF-8, line ends as given; a path's undecodable bytes come out as they were).

    Raises:
        OSError: as the file system says; the old file is then still there, whole.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, (0o777 if executable else 0o666) & ~umask)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_folder(path.parent)


@contextlib.contextmanager
def building(final: Path) -> Iterator[Path]:
    """A new folder beside `final`, renamed to it when the block ends well, deleted when it does not.

    Raises:
        RunError: `final` exists by then (two processes made the same name): nothing of it is touched.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=final.parent))
    try:
        yield temporary
        os.chmod(temporary, 0o755)
        if final.exists():
            raise RunError(f"{final} exists; choose another name, or delete that folder")
        try:
            os.rename(temporary, final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise RunError(f"{final} exists; choose another name, or delete that folder") from error
            raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_folder(final.parent)
