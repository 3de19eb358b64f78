"""A snapshot record: one file in shared memory that holds the files of a state, and how to make that state from it.

Decision: a record is what the trainer's own save would write, so a restart from it is the tested `--resume` from a
folder. The tensors lie in it as plain bytes, those of one type together; everything else is pickled with numbers in
place of tensors. Nothing is serialized twice, and copying the tensors is one call. The header is written last: a
process that dies at any moment leaves a record that is complete or one that is none. A record is never trusted across a
reboot or another run: the header names its run and its settings.

    0      magic, length and CRC-32 of the header's JSON, the JSON
    4096   tensors, one region for each type
    tail   pickle: files, and the pickled table of tensors

The record's folder is the user's alone (mode 0700), so its pickle is code of the user. Standard library only; torch and
numpy where a state holds tensors.
"""

from __future__ import annotations

import copyreg
import io
import json
import math
import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

BODY = 4096  # where the body begins
CHUNK = 1 << 19  # bytes of a piece: between its checksum and its search for NaN it stays in the processor's cache
_MAGIC = b"HPSNAP02"
_HEAD = struct.Struct("<8sII")
_ALIGN = 64
# Bits of a float, and infinity in them. Read as a signed integer, a float without sign is NaN or infinity from there on; read as an
# unsigned one, a float with sign is that from there on with the sign's bit. So two maxima find both, without a copy.
_FLOATS = {
    "float64": (64, 0x7FF0000000000000),
    "float32": (32, 0x7F800000),
    "bfloat16": (16, 0x7F80),
    "float16": (16, 0x7C00),
}


class RecordError(RuntimeError):
    """A record that cannot be written or used; the message says why."""


class Unsupported(RecordError):
    """A state that a record cannot hold; the message names what is in it."""


@dataclass(frozen=True)
class Header:
    """What a complete record says of itself. `finite` is False when a tensor in it holds NaN or infinity."""

    run: str
    spec: str
    boot: str
    attempt: int
    step: int
    epoch: int
    name: str  # of the state's folder
    bytes: int  # of the body
    tail: int  # bytes of its last part, the pickle
    checksum: int  # CRC-32 of the body
    finite: bool
    every: int  # steps between two snapshots when it was written
    wall_s: float  # the wall clock, which file times are compared with
    belongs: dict[str, Any] | None = None  # for the guard file of the state
    python: str = ""  # the interpreter that made it, which can read it too


@dataclass(frozen=True)
class File:
    """One file of a state. `kind` is how it is written: raw (bytes), torch (torch.save), safetensors (a dict of tensors)."""

    name: str
    kind: str
    content: Any
    metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a state lie in a record's body."""

    forms: tuple[list[Any], list[Any]]  # the types and the shapes of the tensors, on which the rest depends
    places: list[tuple[int, str, tuple[int, ...]]]  # offset, type, shape
    regions: list[tuple[int, int, str]]  # offset, bytes, type
    table: bytes  # the places, pickled
    end: int  # where the tail begins


@dataclass(frozen=True)
class Plan:
    """How a state lies in a record's body."""

    tensors: list[Any]
    layout: Layout
    tail: bytes

    @property
    def bytes(self) -> int:
        return self.layout.end + len(self.tail)


def plan(files: list[File], before: Layout | None = None) -> Plan:
    """Where everything of `files` goes. What is no tensor is copied here, so it may change afterwards.

    before: the layout of the last state. It is used again when all tensors have the same form, which nearly always holds and
    saves milliseconds: a LoRA of all blocks of FLUX has 4,000 tensors with its optimizer. Strides are not kept.

    Raises:
        Unsupported: a file holds something that cannot be in a record.
    """
    tensors: list[Any] = []
    stored = [(f.name, f.kind, f.content if f.kind == "raw" else _dump(f, tensors), f.metadata) for f in files]
    forms = [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors]
    layout = before if before is not None and before.forms == forms else _lay_out(tensors, forms)
    return Plan(tensors, layout, pickle.dumps((stored, layout.table), protocol=4))


def _lay_out(tensors: list[Any], forms: tuple[list[Any], list[Any]]) -> Layout:
    by_type: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_type.setdefault(tensor.dtype, []).append(index)
    places: list[Any] = [None] * len(tensors)
    regions: list[tuple[int, int, str]] = []
    at = 0
    for dtype, indexes in by_type.items():
        kind, start = str(dtype).removeprefix("torch."), -(-at // _ALIGN) * _ALIGN
        at = start
        for index in indexes:
            tensor = tensors[index]
            places[index] = at, kind, tuple(tensor.shape)
            at += tensor.nbytes
        regions.append((start, at - start, kind))
    return Layout(forms, places, regions, pickle.dumps(places, protocol=4), -(-at // _ALIGN) * _ALIGN)


def _load(content: bytes, tensors: list[Any]) -> Any:
    """What `_dump` has pickled, with these tensors in it. Raises the errors of unpickling."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) == (__name__, _tensor.__name__):
                return tensors.__getitem__
            return super().find_class(module, name)

    return Unpickler(io.BytesIO(content)).load()


def _tensor(index: int) -> Any:
    """Stands for a tensor in a pickle. `_Unpickler` puts the tensor there."""
    raise RecordError(f"tensor {index} of a snapshot was read without the snapshot")


def _dump(file: File, tensors: list[Any]) -> bytes:
    """The content of a file, pickled, its tensors replaced by their numbers and appended to `tensors`."""
    import torch

    def number(value: Any) -> Any:
        if value.layout is not torch.strided or value.is_quantized:
            return value.__reduce_ex__(4)
        tensors.append(value)
        return _tensor, (len(tensors) - 1,)

    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    # Others (sparse, the 8-bit states of torchao) are pickled as what they consist of, most of it plain tensors.
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: number, torch.nn.Parameter: number}
    try:
        pickler.dump(file.content)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Unsupported(f"{file.name} cannot be kept in memory: {error}") from error
    return buffer.getvalue()


def views(flat: Any, places: list[Any]) -> list[Any]:
    """Tensors over the bytes of a body (a uint8 tensor) at these places."""
    import torch

    found = []
    for at, kind, shape in places:
        dtype = getattr(torch, kind)
        found.append(flat[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
    return found


def copy(targets: list[Any], sources: list[Any], non_blocking: bool = False) -> None:
    """Copy each tensor into the one at the same place in `targets`, which has its type and shape."""
    import torch

    with torch.no_grad():
        if hasattr(torch, "_foreach_copy_"):  # since torch 2.1
            torch._foreach_copy_(targets, sources, non_blocking=non_blocking)
        else:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=non_blocking)


def invalidate(target: mmap.mmap | memoryview) -> None:
    """From now on this is no record."""
    target[: _HEAD.size] = bytes(_HEAD.size)


def seal(target: mmap.mmap | bytearray, header: Header) -> None:
    """Write the header: the record counts from here on. Raises RecordError when the header is too long."""
    text = json.dumps(asdict(header)).encode()
    if _HEAD.size + len(text) > BODY:
        raise RecordError(f"the header of a snapshot has {len(text)} bytes, more than fit")
    target[_HEAD.size : _HEAD.size + len(text)] = text
    target[: _HEAD.size] = _HEAD.pack(_MAGIC, len(text), zlib.crc32(text))


def store(path: str | os.PathLike[str], header: Header, content: Plan) -> Header:
    """Write a complete record; returns its header with sizes, checksum and `finite`. Raises OSError: there is no room."""
    size = BODY + content.bytes
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        mapped = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    if content.tensors:
        import torch

        flat = torch.frombuffer(mapped, dtype=torch.uint8, offset=BODY)
        copy(views(flat, content.layout.places), content.tensors)
    with memoryview(mapped) as whole, whole[BODY:] as body:
        body[content.layout.end :] = content.tail
        good, value = check(body, content.layout.regions)
    header = replace(header, bytes=content.bytes, tail=len(content.tail), checksum=value, finite=good)
    seal(mapped, header)
    return header


def read_header(path: str | os.PathLike[str]) -> Header | None:
    """The header of a complete record; None for anything else. Never raises."""
    try:
        with open(path, "rb", buffering=0) as file:
            return _parse(file.read(BODY))
    except OSError:
        return None


def _parse(data: bytes) -> Header | None:
    if len(data) < _HEAD.size:
        return None
    magic, length, checksum = _HEAD.unpack_from(data)
    text = data[_HEAD.size : _HEAD.size + length]
    if magic != _MAGIC or len(text) != length or zlib.crc32(text) != checksum:
        return None
    try:
        return Header(**json.loads(text))
    except (ValueError, TypeError):  # of another version
        return None


def chunks(bytes_: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the pieces of a body of that many bytes."""
    for begin in range(0, bytes_, CHUNK):
        yield begin, min(begin + CHUNK, bytes_)


def check(
    body: memoryview, regions: list[tuple[int, int, str]], pause: Callable[[], None] = lambda: None
) -> tuple[bool, int]:
    """(whether no float of these regions is NaN or infinity, CRC-32 of the body). Types without a rule (8 bits) are not looked at.

    pause: called between two pieces.
    """
    good, value = True, 0
    for begin, end in chunks(len(body)):
        value = zlib.crc32(body[begin:end], value)
        parts = ((max(at, begin), min(at + size, end), kind) for at, size, kind in regions if kind in _FLOATS)
        good = good and all(_finite(body[first:last], kind) for first, last, kind in parts if first < last)
        pause()
    return good, value


def _finite(data: memoryview, kind: str) -> bool:
    import numpy

    bits, infinity = _FLOATS[kind]
    signed, unsigned = (int(numpy.frombuffer(data, dtype=f"{sign}{bits // 8}").max()) for sign in "iu")
    return signed < infinity and unsigned < (infinity | 1 << (bits - 1))


def verify(path: str | os.PathLike[str], pause: Callable[[], None] = lambda: None) -> str:
    """ "" for a complete record whose checksum is right and whose numbers are finite; else what is wrong with it."""
    header = read_header(path)
    if header is None:
        return "it is not complete"
    if not header.finite:
        return "it holds NaN or infinity"
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            if len(mapped) < BODY + header.bytes:
                return "it is truncated"
            with memoryview(mapped) as whole, whole[BODY : BODY + header.bytes] as body:
                _, found = check(body, [], pause)
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    if found != header.checksum or read_header(path) != header:
        return "its content has changed since it was written (wrong checksum)"
    return ""


def files(path: str | os.PathLike[str]) -> tuple[Header, list[File]]:
    """The header and the files of a record. Tensors are views of the record. Raises RecordError when it cannot be used."""
    if wrong := verify(path):
        raise RecordError(f"{path}: {wrong}")
    header = read_header(path)
    if header is None:
        raise RecordError(f"{path}: it is not complete")
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    end = BODY + header.bytes
    try:
        stored, table = pickle.loads(mapped[end - header.tail : end])
        places = pickle.loads(table)
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError) as error:
        raise RecordError(f"{path}: its table cannot be read: {error}") from error
    found = _tensors(mapped, places) if places else []

    try:
        return header, [
            File(name, kind, content if kind == "raw" else _load(content, found), metadata)
            for name, kind, content, metadata in stored
        ]
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError, ValueError) as error:
        raise RecordError(f"{path}: a file in it cannot be read: {error}") from error


def _tensors(mapped: mmap.mmap, places: list[Any]) -> list[Any]:
    """The tensors of a record, each with a storage of its own: torch.save writes whole storages."""
    import torch

    found = []
    for at, kind, shape in places:
        dtype, count = getattr(torch, kind), math.prod(shape)
        flat = (
            torch.frombuffer(mapped, dtype=dtype, count=count, offset=BODY + at)
            if count
            else torch.empty(0, dtype=dtype)
        )
        found.append(flat.view(shape))
    return found


def write_folder(folder: Path, contents: list[File]) -> None:
    """Write the files of a state into `folder`, as the trainer's own save would. Raises OSError."""
    for file in contents:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.kind == "raw":
            path.write_bytes(file.content)
        elif file.kind == "safetensors":
            from safetensors.torch import save_file

            tensors = {name: tensor.contiguous() for name, tensor in file.content.items()}
            save_file(tensors, path, metadata=file.metadata)
        else:
            import torch

            torch.save(file.content, path)  # to a path, as accelerate: torch puts the file's name into the file
