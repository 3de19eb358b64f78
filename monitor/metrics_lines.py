"""Finds step lines in `metrics.jsonl` without reading it: a run of a million steps has 170 MB.

Within one attempt the steps rise, so a line is found by bisection. Other lines, and lines that a full disk cut off, are
passed over.
"""

from __future__ import annotations

import bisect
import json
from typing import Any, BinaryIO

BLOCK_BYTES = 8 << 10
SEARCHED_BYTES = 1 << 20  # without a step line in so many bytes there is none: a GPU's samples come every 30 s


def first_step(file: BinaryIO, begin: int, end: int) -> dict[str, Any] | None:
    """The first step line that begins in [begin, end) bytes."""
    found = _first_after(file, begin, end)
    return found[1] if found else None


def _first_after(file: BinaryIO, begin: int, end: int) -> tuple[int, dict[str, Any]] | None:
    """(offset, line) of the first step line that begins in [begin, end)."""
    stop = min(end, begin + SEARCHED_BYTES)
    while begin < stop:
        data = read_bytes(file, begin, min(BLOCK_BYTES, end - begin))
        offset = begin
        for line in data.splitlines(keepends=True):
            if line.endswith(b"\n") and (entry := _step(line)) is not None:
                return offset, entry
            offset += len(line)
        complete = data.rfind(b"\n") + 1
        begin += complete or len(data) or BLOCK_BYTES
    return None


def last_step(file: BinaryIO, begin: int, end: int) -> dict[str, Any] | None:
    """The last step line that begins in [begin, end) bytes."""
    stop = max(begin, end - SEARCHED_BYTES)
    while end > stop:
        start = max(begin, end - BLOCK_BYTES)
        data = read_bytes(file, start, end - start)
        for line in reversed(data.splitlines(keepends=True)):
            if line.endswith(b"\n") and (entry := _step(line)) is not None:
                return entry
        cut = data.find(b"\n") + 1  # a line that began before this block is read with the next one
        end = start + (cut if start > begin and 0 < cut < len(data) else 0)
    return None


def step_line(file: BinaryIO, begin: int, end: int, step: int) -> dict[str, Any] | None:
    """The line of a step in [begin, end), whose steps rise; of a missing step, the last line before it."""
    while end - begin > BLOCK_BYTES:
        middle = (begin + end) // 2
        found = _first_after(file, middle, end)
        if found is not None and count_of(found[1].get("step")) <= step:
            begin = found[0]
        else:
            end = middle
    text = read_bytes(file, begin, end - begin + BLOCK_BYTES)
    lines = [line for line in text.splitlines() if _step(line) is not None]  # a validation has a step too
    after = bisect.bisect_right(lines, step, key=lambda line: count_of((_step(line) or {}).get("step")))
    return _step(lines[after - 1]) if after else None


def read_bytes(file: BinaryIO, begin: int, length: int) -> bytes:
    """At most `length` bytes from `begin`; none where they cannot be read."""
    try:
        file.seek(begin)
        return file.read(length)
    except OSError:
        return b""


def _step(line: bytes) -> dict[str, Any] | None:
    entry = json_object(line) if b'"step"' in line else None
    return entry if entry is not None and entry.get("kind") == "step" and is_count(entry.get("step")) else None


def json_objects(text: bytes) -> list[dict[str, Any]]:
    """The JSON objects of the lines of a file. All at once, which is four times faster; one by one where a line is damaged."""
    lines = text.splitlines()
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return [found for line in lines if (found := json_object(line)) is not None]
    return [value for value in values if isinstance(value, dict)]


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
