"""Finds step lines in `metrics.jsonl` without reading it: a run of a million steps has 170 MB.

Within one attempt the steps rise, so a line is found by bisection. Other lines, and lines that a full disk cut off, are
passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import orjson

BLOCK_BYTES = 8 << 10
SEARCHED_BYTES = 1 << 20  # without a step line in so many bytes there is none: a GPU's samples come every 30 s


def steps(file: BinaryIO, begin: int, end: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset, line) of each step line in [begin, end) bytes. A part of a line at `begin` or `end` is none."""
    rest = b""
    while data := read_bytes(file, begin + len(rest), min(BLOCK_BYTES, end - begin - len(rest))):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            entry = json_object(line) if b'"step"' in line else None  # a validation has a step too
            if entry is not None and entry.get("kind") == "step" and is_count(entry.get("step")):
                yield begin, entry
            begin += len(line) + 1


def first_step(file: BinaryIO, begin: int, end: int) -> dict[str, Any] | None:
    """The first step line in [begin, end) bytes."""
    return next(steps(file, begin, min(end, begin + SEARCHED_BYTES)), (0, None))[1]


def last_step(file: BinaryIO, begin: int, end: int) -> dict[str, Any] | None:
    """The last step line in [begin, end) bytes."""
    length = BLOCK_BYTES
    while True:
        *_, last = None, *steps(file, max(begin, end - length), end)
        if last is not None or length >= min(end - begin, SEARCHED_BYTES):
            return last[1] if last else None
        length *= 2


def step_line(file: BinaryIO, begin: int, end: int, step: int) -> dict[str, Any] | None:
    """The line of a step in [begin, end), whose steps rise; of a missing step, the last line before it."""
    low, high = begin, end
    while high - low > BLOCK_BYTES:
        middle = (low + high) // 2
        offset, entry = next(steps(file, middle, min(end, middle + SEARCHED_BYTES)), (end, None))
        if entry is not None and offset < high and entry["step"] <= step:
            low = offset
        else:
            high = middle
    *_, last = None, *(entry for _, entry in steps(file, low, min(end, high + BLOCK_BYTES)) if entry["step"] <= step)
    return last


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
