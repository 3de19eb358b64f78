"""Cache files (.npz) that cannot block a run for ever, nor make it fail for ever.

`np.load` of an npz reads the zip directory only; the bytes come, and can hang or be corrupt, at `archive[key]`. So
each member is read under a time limit and its CRC is checked before numpy sees a byte of it. A file that cannot be right
is renamed `.corrupt` and reported as `ValueError`: the next start finds no cache and encodes it anew, where it used to
fail in the same place each time. Files are written aside and renamed, so a kill in mid-write leaves none that is half
there. (No fsync: after a power cut a cache that fails its CRC is encoded again, and a data set has thousands of them.)

Only builtin exceptions leave this file: they cross from a DataLoader worker to its parent (see bounded.py).
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from guards.bounded import bounded

if TYPE_CHECKING:
    import numpy

_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError)
"""What zipfile and numpy raise on damaged bytes (RuntimeError: a flipped bit says encrypted, or compressed in an unknown way)."""


class Archive:
    """What `np.load` returns for an npz, as far as it is used: members by key, `in`, `files`, a context manager.

    The directory is read on opening, each member when asked for, every read within `timeout_s`.
    """

    def __init__(self, path: str | os.PathLike, timeout_s: float = 30.0) -> None:
        """Raises TimeoutError, FileNotFoundError, other OSError, or ValueError after setting a damaged file aside."""
        self.path = Path(path)
        self.timeout_s = timeout_s
        self._zip = self._guard(self._open, "the directory")
        self.files = [name.removesuffix(".npy") for name in self._zip.namelist()]

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, key: str) -> bool:
        return key in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: str) -> numpy.ndarray:
        """One member. KeyError names the file and what it holds."""
        if key not in self.files:
            raise KeyError(f"{self.path}: no {key!r}; it holds {', '.join(self.files)}")
        return self._guard(lambda: self._read(key), repr(key))

    def keys(self) -> list[str]:
        """The names of the members."""
        return self.files

    def close(self) -> None:
        """Close the file."""
        self._zip.close()

    def verify(self) -> None:
        """Read every member. Raises as `__getitem__` does."""
        for key in self.files:
            self[key]

    def _guard(self, read, part: str):
        try:
            return bounded(read, self.timeout_s, f"{part} of {self.path}")
        except _DAMAGE as error:
            raise ValueError(f"{self.path} is damaged ({part}: {error}); {_set_aside(self.path)}") from None

    def _open(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.path)

    def _read(self, key: str) -> numpy.ndarray:
        from numpy.lib import format as npy

        name = key if key in self._zip.NameToInfo else f"{key}.npy"
        data = self._zip.read(name)  # checks the CRC
        return npy.read_array(io.BytesIO(data), allow_pickle=False)


def load(
    path: str | os.PathLike, keys: Iterable[str] | None = None, timeout_s: float = 30.0
) -> dict[str, numpy.ndarray]:
    """The members of an npz (all, or those of `keys`), each read completely and verified; `timeout_s` is for each read.

    Raises TimeoutError naming the file; ValueError after renaming a damaged one `.corrupt`; KeyError for a member
    that is not there; FileNotFoundError and other OSError as they come.
    """
    with Archive(path, timeout_s) as archive:
        return {key: archive[key] for key in (archive.files if keys is None else keys)}


def save(path: str | os.PathLike, **arrays: object) -> Path:
    """`np.savez(path, **arrays)`, but whole or not at all. Returns the path, with `.npz` added where it lacks it."""
    import numpy

    final = Path(path)
    if final.suffix != ".npz":
        final = final.with_name(final.name + ".npz")  # as numpy does
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            numpy.savez(file, **arrays)
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    return final


def set_aside_near(path: str | os.PathLike) -> bool:
    """True where some cache of that folder has been found damaged before: its neighbours deserve a full look."""
    return any(name.endswith(".corrupt") for name in os.listdir(Path(path).parent))


def _set_aside(path: Path) -> str:
    target = path.with_name(path.name + ".corrupt")
    try:
        os.replace(path, target)
    except FileNotFoundError:
        return "another worker has set it aside"
    except OSError as error:
        return f"it could not be renamed ({error.strerror}): delete it, then start again"
    return f"renamed {target.name}, so that it is encoded anew when it is looked for"
