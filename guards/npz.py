"""Cache files (.npz) that neither block a run for ever nor make every start of it fail.

`np.load` reads only the zip directory of an npz. The bytes are read, and the read can hang or find damage, at
`archive[key]`. So each member is read within a limit, and its CRC is checked before numpy parses it. A damaged file is
renamed to `.corrupt` and reported as a `ValueError`: the next start finds no cache and encodes the image again. Files
are written under a temporary name and renamed, so a kill during the write leaves no partial file. (There is no fsync:
after a power failure a cache with a wrong CRC is encoded again, and a data set has thousands of caches.)

Only builtin exceptions leave this module, because they cross from a DataLoader worker to its parent (see deadline.py).
"""

from __future__ import annotations

import errno
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from guards import limits
from guards.checkpoint import writing_file
from guards.deadline import bounded

if TYPE_CHECKING:
    import numpy

T = TypeVar("T")
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, TypeError, ArithmeticError, RuntimeError)
"""What zipfile and numpy raise for damaged bytes (RuntimeError: a flipped bit turned on encryption)."""


class Archive(Mapping[str, "numpy.ndarray"], AbstractContextManager["Archive"]):
    """The used part of what `np.load` returns for an npz: a mapping, `files`, a context manager.

    The directory is read when it is opened, each member when it is accessed; every read within `npz_timeout_s`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises TimeoutError, FileNotFoundError, other OSError, or ValueError after a damaged file was renamed."""
        self.path = Path(path)
        self._zip = self._guarded(lambda: zipfile.ZipFile(self.path), "the directory")
        self.files = [name.removesuffix(".npy") for name in self._zip.namelist()]

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, key: object) -> bool:
        return key in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: str) -> numpy.ndarray:
        """One member. KeyError names the file and its members."""
        if key not in self.files:
            raise KeyError(f"{self.path}: no {key!r}; it holds {', '.join(self.files)}")
        return self._guarded(lambda: self._read(key), repr(key))

    def close(self) -> None:
        """Close the file; members that were read stay."""
        self._zip.close()

    def _guarded(self, read: Callable[[], T], part: str) -> T:
        def attempt() -> tuple[T] | Exception:  # what `bounded` itself raises (no thread can be started) is no damage
            try:
                return (read(),)
            except _DAMAGE as error:
                failed = error.__context__  # a disk that cannot be read is "not a zip file" in zipfile's words
                if isinstance(failed, OSError) and failed.errno != errno.EINVAL:
                    raise failed from None
                return error
            except MemoryError as error:  # its header may name more numbers than any machine holds
                raise MemoryError(f"{part} of {self.path}: {error or 'too little memory'}") from error
            except OSError as error:
                if error.errno != errno.EINVAL:  # a damaged directory that names a place before the file's first byte
                    raise
                return error

        found = bounded(attempt, limits.seconds("npz_timeout_s"), f"{part} of {self.path}")
        if isinstance(found, Exception):
            if hasattr(self, "_zip"):
                self.close()  # Windows renames no open file
            raise ValueError(f"{self.path} is damaged ({part}: {found}); {_set_aside(self.path)}")
        return found[0]

    def _read(self, key: str) -> numpy.ndarray:
        from numpy.lib import format as npy

        name = key if key in self._zip.NameToInfo else f"{key}.npy"
        data = self._zip.read(name)  # checks the CRC
        return npy.read_array(io.BytesIO(data), allow_pickle=False)


def load(path: str | os.PathLike[str]) -> dict[str, numpy.ndarray]:
    """The members of an npz, read completely and verified. Raises as `Archive` does."""
    with Archive(path) as archive:
        return dict(archive)


def save(path: str | os.PathLike[str], **arrays: object) -> Path:
    """`np.savez(path, **arrays)`, complete or not at all. Returns the path, with `.npz` added if it is missing."""
    import numpy

    name = os.fspath(path)
    final = Path(name if name.endswith(".npz") else f"{name}.npz")  # as numpy does
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    with writing_file(final, sync=False, temporary=temporary), open(temporary, "wb") as file:
        numpy.savez(file, **arrays)  # type: ignore[arg-type]  # its other keyword is a bool
    return final


def _set_aside(path: Path) -> str:
    try:
        os.replace(path, f"{path}.corrupt")
    except FileNotFoundError:
        return "another worker has renamed it"
    except OSError as error:
        return f"it cannot be renamed ({error.strerror}). Delete it and start again"
    return f"renamed to {path.name}.corrupt. The next start encodes the image again"
