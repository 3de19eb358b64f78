"""The files of a snapshot in memory: how a state lies there, and how the trainer's own files are made from it.

Decision: a snapshot is a state folder in shared memory with the guard file of every state, so `checkpoint.py` writes,
finds and verifies it. Only its files differ, because a step has no time for torch.save: the tensors lie as plain bytes
in one safetensors file, and everything else is pickled with numbers in place of tensors. Copying the tensors is one
call. A restart makes the files that the trainer's own save would have written, so it is the tested `--resume`.

The folder is the user's alone (mode 0700), so its pickle is code of the user. Standard library only; torch where a
state holds tensors.

The monitor runs `python -m guards.snapshot_files SNAPSHOT FOLDER` when a run ends, with the interpreter that made the
snapshot. The last line of its output is JSON: {"state": the folder that it wrote}. Exit codes: 0 done; 1 the snapshot
cannot be used, or the disk refuses, with the reason on standard error.
"""

from __future__ import annotations

import copyreg
import io
import json
import math
import mmap
import os
import pickle
import shutil
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guards import checkpoint

RING = "HANGPROOF_SNAPSHOTS"  # the variable with the folder of the snapshots
SPEC, LIMIT = "HANGPROOF_SNAPSHOTS_SPEC", "HANGPROOF_SNAPSHOTS_BYTES"  # see snapshots.py
RESUMED = "resumed"  # in that folder: the states that restarts make from snapshots
OFF = "off"  # there: the file that says why there are no snapshots
TENSORS, FILES = "tensors.safetensors", "files.pickle"
_ALIGN = 64
_FLOATS = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""What the search for NaN has to know by safetensors' names. Other types have torch's names."""
_TYPES = dict(zip(_FLOATS.values(), _FLOATS, strict=True))
_DAMAGE = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError, ValueError)


class SnapshotError(RuntimeError):
    """A snapshot that cannot be taken or used; the message says why."""


@dataclass(frozen=True)
class File:
    """One file of a state. `kind`, how it is written: raw (bytes), torch (torch.save), safetensors (of tensors)."""

    name: str
    kind: str
    content: Any
    metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a state lie in TENSORS."""

    forms: tuple[list[Any], list[Any]]  # the types and the shapes of the tensors, on which the rest depends
    places: list[tuple[int, str, tuple[int, ...]]]  # offset behind the header, type, shape
    header: bytes
    end: int  # where the last tensor ends, from the header


@dataclass(frozen=True)
class Plan:
    """What a snapshot of a state consists of."""

    tensors: list[Any]
    layout: Layout
    rest: bytes  # the content of FILES

    @property
    def bytes(self) -> int:
        """The size of the snapshot's file."""
        return len(self.layout.header) + self.layout.end + len(self.rest)


def plan(files: list[File], before: Layout | None = None) -> Plan:
    """Where everything of `files` goes. What is no tensor is copied here, so it may change afterwards.

    before: the layout of the last state. It is used again when all tensors have the same form, which nearly always
    holds and saves milliseconds: FLUX's LoRA of all blocks has 4,000 tensors with its optimizer. Raises SnapshotError.
    """
    tensors: list[Any] = []
    stored = [(f.name, f.kind, f.content if f.kind == "raw" else _dump(f, tensors), f.metadata) for f in files]
    forms = [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors]
    layout = before if before is not None and before.forms == forms else _lay_out(tensors, forms)
    return Plan(tensors, layout, pickle.dumps(stored, protocol=4))


def _lay_out(tensors: list[Any], forms: tuple[list[Any], list[Any]]) -> Layout:
    places: list[Any] = [None] * len(tensors)
    table = {}
    at = 0
    # The types with the longest numbers first: each number is aligned, and there are no gaps, as safetensors demands.
    for index, tensor in sorted(enumerate(tensors), key=lambda entry: -entry[1].element_size()):
        kind, end = str(tensor.dtype).removeprefix("torch."), at + tensor.nbytes
        places[index] = at, kind, tuple(tensor.shape)
        table[str(index)] = {"dtype": _FLOATS.get(kind, kind), "shape": [*tensor.shape], "data_offsets": [at, end]}
        at = end
    text = json.dumps(table).encode()
    text = text.ljust(-(-(8 + len(text)) // _ALIGN) * _ALIGN - 8)
    return Layout(forms, places, len(text).to_bytes(8, "little") + text, at)


def _dump(file: File, tensors: list[Any]) -> bytes:
    """The content of a file, pickled, its tensors replaced by their numbers and appended to `tensors`."""
    import torch

    def number(value: Any) -> Any:
        if value.layout is not torch.strided or value.is_quantized:
            return value.__reduce_ex__(4)
        if value.ndim > 1 and not value.is_contiguous() and value.mT.is_contiguous():
            return getattr, (value.mT, "mT")  # SOAP's: in another order in memory, its products are rounded otherwise
        tensors.append(value)
        return _tensor, (len(tensors) - 1,)

    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    # Others (sparse, the 8-bit states of torchao) are pickled as what they consist of, most of it plain tensors.
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: number, torch.nn.Parameter: number}
    try:
        pickler.dump(file.content)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise SnapshotError(f"{file.name} cannot be kept in memory: {error}") from error
    return buffer.getvalue()


def _load(content: bytes, tensors: list[Any]) -> Any:
    """What `_dump` has pickled, with these tensors in it. Raises the errors of unpickling."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) == ("guards.snapshot_files", _tensor.__name__):  # which is `__main__` in the command
                return tensors.__getitem__
            return super().find_class(module, name)

    return Unpickler(io.BytesIO(content)).load()


def _tensor(index: int) -> Any:
    """Stands for a tensor in a pickle. `_load` puts the tensor there."""
    raise SnapshotError(f"tensor {index} of a snapshot was read without the snapshot")


def create(folder: Path, layout: Layout) -> tuple[mmap.mmap | None, list[Any]]:
    """TENSORS in a folder, mapped, and its tensors; (None, []) for none. Raises OSError: there is no room."""
    if not layout.places:
        return None, []
    import torch

    with open(folder / TENSORS, "w+b", buffering=0) as file:
        size = len(layout.header) + layout.end
        # Without this, a full file system is a bus error at the first write to a page.
        os.posix_fallocate(file.fileno(), 0, size)
        file.write(layout.header)
        mapped = mmap.mmap(file.fileno(), size)
    return mapped, views(torch.frombuffer(mapped, dtype=torch.uint8, offset=len(layout.header)), layout.places)


def views(flat: Any, places: list[tuple[int, str, tuple[int, ...]]]) -> list[Any]:
    """Tensors over the bytes of `flat` (a uint8 tensor): of each the offset, the type and the shape."""
    import torch

    found = []
    for at, kind, shape in places:
        dtype = getattr(torch, kind)
        found.append(flat[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
    return found


def copy(targets: list[Any], sources: list[Any], non_blocking: bool = False) -> None:
    """Copy each tensor into the one at the same place in `targets`, which has its type and shape."""
    if targets:
        import torch

        with torch.no_grad():
            torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def complete(folder: Path, content: Plan, mapped: mmap.mmap | None, guard: Mapping[str, Any]) -> None:
    """Write what is not TENSORS (`mapped`), the guard file last: the snapshot counts from here on. Raises OSError.

    guard: "step", "epoch" and what else it says.
    """
    with open(f"{folder}/{FILES}", "wb", buffering=0) as file:  # a Path for each would cost as much as the writing
        file.write(content.rest)
    files = {FILES: content.rest} | ({TENSORS: mapped} if mapped is not None else {})
    checks = {name: (len(data), zlib.crc32(data)) for name, data in files.items()}
    checkpoint.write_guard(folder, in_memory=checks, **guard)


def read(folder: Path) -> list[File]:
    """The files of the state in a snapshot. Tensors are views of it. Raises SnapshotError when it cannot be used."""
    if wrong := checkpoint.problems(folder):
        raise SnapshotError(f"{folder}: {'; '.join(wrong)}")
    try:
        tensors = _tensors(folder / TENSORS) if (folder / TENSORS).exists() else []
        return [
            File(name, kind, content if kind == "raw" else _load(content, tensors), metadata)
            for name, kind, content, metadata in pickle.loads((folder / FILES).read_bytes())
        ]
    except (OSError, *_DAMAGE) as error:
        raise SnapshotError(f"{folder}: it cannot be read: {error}") from error


def _tensors(path: Path) -> list[Any]:
    """The tensors of TENSORS, each with a storage of its own: torch.save writes whole storages."""
    import torch

    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(mapped[:8], "little")
    table = json.loads(mapped[8:start])
    entries = [table[str(index)] for index in range(len(table))]
    places = [(one["data_offsets"][0], _TYPES.get(one["dtype"], one["dtype"]), one["shape"]) for one in entries]
    return [tensor.clone() for tensor in views(torch.frombuffer(mapped, dtype=torch.uint8, offset=start), places)]


def write_state(state: Path, files: list[File], step: int, epoch: int, **extra: Any) -> Path:
    """Write `state` as the trainer's own save would. Raises OSError; RuntimeError (torch's) where the disk is full."""
    with checkpoint.writing(state, step, epoch, **extra) as temporary:
        for file in files:
            path = temporary / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.kind == "raw":
                path.write_bytes(file.content)
            elif file.kind == "safetensors":
                from safetensors.torch import save  # `save_file` has an error of its own for a full disk

                tensors = {name: tensor.contiguous() for name, tensor in file.content.items()}
                path.write_bytes(save(tensors, metadata=file.metadata))
            else:
                import torch

                torch.save(file.content, path)  # to a path, as accelerate: torch puts the file's name into the file
    return state


def write_state_of(snapshot: Path, state: Path) -> None:
    """Write the state of a snapshot. Raises SnapshotError when that cannot be used; else as `write_state`."""
    files, guard = read(snapshot), checkpoint.guard_of(snapshot)
    if guard is None:
        raise SnapshotError(f"{snapshot}: it is gone")
    write_state(state, files, **{name: guard[name] for name in ("step", "epoch", "belongs") if name in guard})


def restore(folder: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> None:
    """Make the state `folder`, which `--resume` names, from its snapshot; nothing for another state.

    Raises:
        SnapshotError: the snapshot cannot be used, or its state has no room. It is removed, so the next attempt resumes
            from another one or from the disk.
    """
    if not is_restored(folder, environ):
        return
    folder = Path(folder)
    snapshot = folder.parent.parent / folder.name
    try:
        saved = (snapshot / checkpoint.GUARD).stat()
        write_state_of(snapshot, folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's, too
        # Without the system's words, which say that a disk is full.
        reason = error if isinstance(error, SnapshotError) else f"{folder} cannot be written"
        shutil.rmtree(snapshot, ignore_errors=True)
        text = f"the snapshot in memory cannot be used, so the next attempt resumes elsewhere: {reason}"
        raise SnapshotError(text) from None
    os.utime(folder / checkpoint.GUARD, (saved.st_mtime, saved.st_mtime))  # file times are compared with it


def is_restored(folder: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a state comes from a snapshot: all of its step was done, and it is gone when the run ends."""
    ring = environ.get(RING, "")
    return bool(ring) and Path(folder).parent == Path(ring) / RESUMED


def main(argv: list[str]) -> int:
    """The command. Exit codes as the module says."""
    snapshot, output = Path(argv[0]), Path(argv[1])
    try:
        write_state_of(snapshot, output / snapshot.name)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's, where the disk is full
        print(getattr(error, "strerror", None) or error, file=sys.stderr)
        return 1
    print(json.dumps({"state": str(output / snapshot.name)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
