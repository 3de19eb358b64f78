"""What is inside the files of a state: tensors that are complete and finite, and an optimizer that loads.

Standard library only; the check of an optimizer imports torch.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import BinaryIO

# What torch's unpickler meets in bytes that are no state, beside its own error: it reads them as instructions.
TORN = (ValueError, EOFError, LookupError, TypeError, AttributeError, AssertionError, struct.error)


class DamagedFile(RuntimeError):
    """A file that is not what it should be. The message names the file and the reason."""


def damage(path: Path) -> str:
    """What is wrong inside a file of a state; "" for nothing. Raises OSError, MemoryError, ImportError (of torch)."""
    if path.suffix == ".safetensors":
        return tensor_damage(path)
    return optimizer_damage(path) if path.suffix in (".bin", ".pt") and path.name.startswith("optimizer") else ""


def optimizer_damage(path: Path) -> str:
    """Damage is what torch reports of the content; not that it is missing or broken, or lacks a type (SCION's)."""
    import pickle
    import zipfile

    try:
        import torch
    except Exception as error:  # missing, damaged, or built for another numpy or CUDA
        raise ImportError(f"torch does not load: {error}") from error
    try:
        # torch maps only files in its zip format, and then needs no memory for their tensors.
        torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (*TORN, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        text = (str(error).splitlines() or [""])[0] or type(error).__name__
        # "DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory (12)"
        if isinstance(error, RuntimeError) and ("alloc" in text or "memory" in text):
            raise MemoryError(text) from error
        return "" if "Unsupported global: GLOBAL " in str(error) else f"{path.name}: does not load: {text}"
    return ""


def tensor_damage(path: Path) -> str:
    """Why a file is no complete safetensors file, or its first tensor that holds NaN or infinity; "" for neither.

    Raises OSError or MemoryError when it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            for name, dtype, begin, end in _read_header(file, path):
                if dtype in _FLOATS:
                    file.seek(begin)
                    if _holds_non_finite(file.read(end - begin), *_FLOATS[dtype]):
                        return f"{path.name}: {name} holds NaN or infinity"
    except DamagedFile as error:
        return str(error)
    return ""


def _read_header(file: BinaryIO, path: Path) -> list[tuple[str, str, int, int]]:
    """Name, type, first byte and end of each tensor in a safetensors file. Raises DamagedFile.

    Format (github.com/huggingface/safetensors): an 8-byte little-endian header length, a JSON header, the data. The
    tensors must cover the data without a gap and to its last byte, so that a truncated or padded file is found here.
    """
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if length > min(size - 8, 100_000_000):  # safetensors' own limit
        raise DamagedFile(f"{path}: truncated, or not a safetensors file")
    start = 8 + length
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = [
            (name, str(entry["dtype"]), *(start + int(offset) for offset in entry["data_offsets"]))
            for name, entry in header.items()
        ]
        at = start
        for name, _, begin, end in sorted(tensors, key=lambda tensor: tensor[2:]):
            if begin != at or end < at:
                raise DamagedFile(f"{path}: {name} is not where the tensor before it ends")
            at = end
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedFile(f"{path}: its safetensors header is damaged: {type(error).__name__}: {error}") from error
    if not tensors:
        raise DamagedFile(f"{path}: it holds no tensors")
    if at != size:
        raise DamagedFile(f"{path}: {size - start} bytes of data instead of {at - start}: truncated or damaged")
    return tensors


# A float is NaN or infinity when all bits of its exponent are set. They are in its last byte and the upper bits of the
# byte before: type -> (bytes of a number, last bytes that qualify, mask of the byte before).
# In plain Python, because a restart waits for this result, and importing numpy takes longer than this search.
_FLOATS = {
    "F64": (8, b"\x7f\xff", 0xF0),
    "F32": (4, b"\x7f\xff", 0x80),
    "BF16": (2, b"\x7f\xff", 0x80),
    "F16": (2, bytes([*range(0x7C, 0x80), *range(0xFC, 0x100)]), 0x00),
}


def _holds_non_finite(data: bytes, width: int, last: bytes, mask: int) -> bool:
    ends = data[width - 1 :: width]
    if not any(byte in ends for byte in last):  # nearly always: no weight is that large
        return False
    return any(end in last and byte & mask == mask for end, byte in zip(ends, data[width - 2 :: width], strict=True))
