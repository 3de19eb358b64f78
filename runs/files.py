"""Atomic writes of files and folders.

A file is written to a temporary name in its folder, fsynced and renamed; a folder is built beside its final place and
renamed. After an interruption (a full disk, Ctrl-C, invalid input) the old state is still there.
"""

import contextlib
import enum
import errno
import os
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from guards.checkpoint import files_below, fsync_path, rename, writing_file

SENSIBLE = 1e15  # no number in a file of ours is larger


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong. field: of the spec, or "" for none; message: the problem and what to do."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class RunError(Exception):
    """An error that a user can fix, as one or several faults. Each says what is wrong, where, and what to do."""

    def __init__(self, what: str | Iterable[Fault]):
        self.faults: tuple[Fault, ...] = (Fault("", what),) if isinstance(what, str) else tuple(what)
        super().__init__("\n".join(map(str, self.faults)))


REASONS = {
    errno.ENOSPC: "the disk is full; free some space and try again (delete files where df -i shows no free inode)",
    errno.EDQUOT: "your disk quota is used up; free some space and try again",
    errno.EACCES: "no permission there, or on Windows a program has a file open; close it, fix the folder's "
    "permissions, or set HANGPROOF_DATA to a folder of yours",
    errno.EFBIG: "the file is larger than this file system or user may write; use another disk, or raise the limit",
    errno.EROFS: "the file system is read-only; set HANGPROOF_DATA to a folder on another disk",
    errno.EIO: "the disk or network drive cannot be read or written; check it, and how it is connected",
    errno.EEXIST: "a file has the name of the folder; move or rename the file, or set HANGPROOF_DATA to another folder",
    errno.ENAMETOOLONG: "the path is too long; use a shorter name, or set HANGPROOF_DATA to a shorter path",
    errno.ENOENT: "the folder does not exist; create it, or set HANGPROOF_DATA to an existing folder",
}
REASONS |= {errno.EPERM: REASONS[errno.EACCES], errno.ENOTDIR: REASONS[errno.EEXIST]}
REASONS |= dict.fromkeys([errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN], REASONS[errno.EIO])


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an OSError of the block into a RunError that says what failed, where, why, and what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # of a copy or a rename, the disk of its target
        path = error.filename2 if full and error.filename2 else error.filename
        where = f" ({path})" if path else ""
        reason = REASONS.get(error.errno or 0) or error.strerror or str(error)
        raise RunError(f"cannot {what}{where}: {reason}") from error


def unwritable(folder: Path) -> str:
    """Why nothing can be written to a folder, found by writing, for a quota shows in no figure; "" where it can, or is gone."""
    try:
        with explained(f"write to {folder}"), tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
    except RunError as error:
        return str(error) if folder.is_dir() else ""
    return ""


def private_folder(path: Path) -> Path:
    """A folder for this user alone, made when missing; a link is not followed. OSError: it is somebody else's."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or (sys.platform != "win32" and found.st_uid != os.getuid()):
        raise OSError(errno.EPERM, f"{path} is a link, or belongs to another user; remove it")
    path.chmod(0o700)
    return path


def atomic_write(path: Path, content: str | bytes, executable: bool = False, private: bool = False) -> None:
    """Replace the file `path` by `content`. Text is written as UTF-8 with its own line ends; surrogates become the
    bytes of a path that is not UTF-8. private: only the owner may read it.

    Raises:
        OSError: the file could not be written; the old file is unchanged.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    mode = 0o600 if private else 0o777 if executable else 0o666
    with writing_file(path, temporary=path.with_name(f".{path.name[:40]}.{os.urandom(6).hex()}")) as temporary:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)


def copy_with_times(source: Path, target: Path) -> None:
    """Copy a file with its times, as far as the file system lets this user set them. OSError: it cannot be copied."""
    shutil.copyfile(source, target)
    with contextlib.suppress(PermissionError):
        shutil.copystat(source, target)


def checksum(content: bytes) -> str:
    """A short checksum of a file, which tells an edit."""
    return f"{zlib.crc32(content):08x}-{len(content)}"


def typed(kind: Any, value: Any, key: str = "") -> Any:
    """A value of a JSON file as this type says: a class, a dataclass of such, or lists and dictionaries of them.

    Keys that a dataclass does not have are left out: a later version wrote them. A file can be damaged, or come from a
    store, where anybody may have written it.

    Raises:
        TypeError, ValueError: it has another type, lacks a field, or is a number that makes no sense; `key` is named.
    """
    origin: Any = get_origin(kind) or kind  # of `list[int]`: list, with the parts (int,)
    parts = get_args(kind)
    if kind is Any or (value is None and NoneType in parts):
        return value
    if NoneType in parts:  # `X | None`
        return typed(parts[0], value, key)
    if hasattr(origin, "__dataclass_fields__") and isinstance(value, dict):
        known = {name: of for name, of in get_type_hints(origin).items() if name in value}
        return origin(**{name: typed(of, value[name], name) for name, of in known.items()})
    if issubclass(origin, enum.Enum):
        return origin(value)
    if issubclass(origin, list | tuple) and isinstance(value, list):
        each = parts if origin is tuple and ... not in parts else (parts or (str,))[:1] * len(value)
        return origin(typed(part, one, key) for part, one in zip(each, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {name: typed(parts[1], one, f"{key}.{name}") for name, one in value.items()}
    wanted = int | float if origin is float else origin
    if not isinstance(value, wanted) or isinstance(value, bool) is not (origin is bool):
        raise TypeError(f"{key}: {value!r:.100} is not of type {origin.__name__}")
    if origin in (int, float) and not abs(value) < SENSIBLE:
        raise ValueError(f"{key}: {value!r:.100} is too large")
    return origin(value)


@contextlib.contextmanager
def building(final: Path) -> Iterator[Path]:
    """A new folder, renamed to `final` when the block succeeds and deleted when it raises.

    Raises:
        RunError: `final` exists already, for example because two processes use the same name; it is not changed.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=final.parent))
    taken = RunError(f"{final} exists already; choose another name")
    try:
        yield temporary
        with contextlib.suppress(PermissionError):  # on a share or stick that root has mounted, modes are fixed
            os.chmod(temporary, 0o755)
        if final.exists():
            raise taken
        for path in files_below(temporary):  # a power cut would leave empty images in a new data set
            fsync_path(path)
        try:
            rename(temporary, final, sync=False)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise taken from error
        temporary = final
        fsync_path(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
