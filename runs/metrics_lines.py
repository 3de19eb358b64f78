"""Finds the last step in `metrics.jsonl` without reading it: a run of a million steps has 170 MB.

Other lines, and lines that a full disk cut off, are passed over.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO

import orjson

BLOCK_BYTES = 8 << 10
SEARCHED_BYTES = 1 << 20  # without a step line in so many bytes there is none: a GPU's samples come every 30 s


def last_step(file: BinaryIO, begin: int, end: int) -> dict[str, Any] | None:
    """The last step line in [begin, end) bytes. A part of a line at `begin` or `end` is none."""
    length = 0
    while length < min(end - begin, SEARCHED_BYTES):
        length = 2 * length or BLOCK_BYTES
        start = max(begin, end - length)
        for line in reversed(read_bytes(file, start, end - start).split(b"\n")):
            entry = json_object(line) if b'"step"' in line else None  # a validation has a step too
            if entry is not None and entry.get("kind") == "step" and is_count(entry.get("step")):
                return entry
    return None


def read_bytes(file: BinaryIO, begin: int, length: int) -> bytes:
    """At most `length` bytes from `begin`; none where they cannot be read."""
    try:
        file.seek(begin)
        return file.read(length)
    except OSError:
        return b""


def json_objects(text: bytes) -> list[dict[str, Any]]:
    """The JSON objects of the lines of a file."""
    return entries([line for line in text.splitlines() if line.strip()])


def entries(lines: list[bytes]) -> list[dict[str, Any]]:
    """The JSON objects of complete lines. All at once, which is ten times faster; one by one where a line is damaged."""
    try:
        values = orjson.loads(b"[" + b",".join(lines) + b"]")
        if len(values) == len(lines):  # no line with two values
            return [value for value in values if isinstance(value, dict)]
    except ValueError:  # also for NaN and Infinity, which other writers leave in a file
        pass
    return [found for line in lines if (found := json_object(line)) is not None]


def json_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None where it is incomplete or something else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_count(value: object) -> bool:
    """Whether a value from a file is a whole number of at least 0, and not absurdly large."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60


def count_of(value: object) -> int:
    """A whole number of at least 0; 0 for everything else."""
    return value if isinstance(value, int) and is_count(value) else 0
