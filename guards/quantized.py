"""Frozen weights in fewer bits, kept in a file beside the model: made at the first start, read at each later one.

A start that casts reads all bf16 weights (24 GB of FLUX) and computes on each of them. The copy has half the bytes, and
is used as it is. It is written while the model is first read, and gets its name when it is complete and on the disk.

Decision: in `.hangproof-cache` in the model's folder, under a name that holds a hash of the model's files and of what
was made from them. Another model, or another cast, has another copy, which replaces the old one. Nothing needs the
copy: where the folder cannot be written or the disk has no room, one line says so, and each start casts as before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guards.checkpoint import fsync_path, rename

FOLDER = ".hangproof-cache"
SUFFIX = ".safetensors"
THREAD = "hangproof-float8"
RESERVE = 8 << 30  # bytes of the disk that stay free: caches, samples and checkpoints come there too
END = 1 << 16  # bytes at each end of a file that are part of its hash
START = 2 << 20  # bytes before the tensors, for a header of at least 5,000 of them: they begin at a page
LEFT_AGE_S = 3600.0  # an unfinished copy that nobody has written to for this long belongs to a process that is gone
TYPES = {
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.float32": "F32",
}


def key(files: Sequence[Path], recipe: str) -> str:
    """A hash of the model's files (sizes, times, both ends of each) and of what is made from them. OSError."""
    digest = hashlib.sha256(recipe.encode())
    for path in files:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            digest.update(f"\0{path.name}:{found.st_size}:{found.st_mtime_ns}\0".encode() + file.read(END))
            file.seek(max(0, found.st_size - END))
            digest.update(file.read(END))
    return digest.hexdigest()[:16]


class Copy:
    """The copy of one model: `path` exists when it is complete. `add` each tensor and `finish`, or `give_up`."""

    def __init__(self, folder: Path, files: Sequence[Path], recipe: str) -> None:
        """`folder`: of the model. `files`: what the copy is made from. OSError: they cannot be read."""
        self.path = folder / FOLDER / f"{files[0].stem.split('-0000')[0]}-{key(files, recipe)}{SUFFIX}"
        self.temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        self._need = sum(path.stat().st_size for path in files) // 2 + RESERVE  # more than a copy in float8 needs
        self._file: Any = None
        self._entries: dict[str, Any] = {}
        self._given_up = False
        with contextlib.suppress(OSError):
            for left in self.path.parent.glob("*.tmp"):  # of killed processes
                if time.time() - left.stat().st_mtime > LEFT_AGE_S:
                    left.unlink()

    def _begin(self) -> None:
        """Open the file, and remove older copies. OSError."""
        folder = self.path.parent
        folder.mkdir(exist_ok=True)
        for other in folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process reads it, on Windows
                if other.stem[:-16] == self.path.stem[:-16] and other != self.path:
                    other.unlink()
        free = shutil.disk_usage(folder).free
        if free < self._need:
            raise OSError(0, f"the disk has {free / 1e9:.0f} GB free, and {self._need / 1e9:.0f} GB are needed")
        self._file = open(self.temporary, "wb")  # noqa: SIM115 - until `finish`
        self._file.seek(START)

    def add(self, name: str, tensor: Any) -> None:
        """Append a tensor that will not change. Where the copy cannot be written, says so once and does nothing."""
        if self._given_up:
            return
        import torch

        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        try:
            if self._file is None:
                self._begin()
            at = self._file.tell() - START
            self._file.write(flat.numpy().data)
        except OSError as error:
            return self._fail(error)
        place = [at, at + flat.numel()]
        self._entries[name] = {"dtype": TYPES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": place}

    def finish(self) -> None:
        """All tensors are there: the file is completed in a thread, because a disk may need long for it."""
        if self._entries and not self._given_up:
            threading.Thread(target=self._complete, name=THREAD, daemon=True).start()

    def give_up(self) -> None:
        """Remove what was written so far."""
        self._given_up = True
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
            self.temporary.unlink(missing_ok=True)

    def _fail(self, error: OSError) -> None:
        why = f"so each start casts them: {self.path.parent} cannot be written: {error.strerror}"
        print(f"hangproof: no copy of the weights in fewer bits is kept, {why}", flush=True)
        self.give_up()

    def _complete(self) -> None:
        text = json.dumps(self._entries).encode()
        try:
            if len(text) > START - 8:
                raise OSError(0, "the names of the tensors are too long")
            self._file.seek(0)
            self._file.write((START - 8).to_bytes(8, "little") + text.ljust(START - 8))
            self._file.close()
            fsync_path(self.temporary)
            rename(self.temporary, self.path)
        except OSError as error:
            self._fail(error)
