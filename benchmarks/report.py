"""What each benchmark gives to the command `python -m benchmarks`, which prints it; ratios of pairs.

A pair is one measurement of ours and one of another, in turns on the same machine at the same time.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Report:
    """The figures of a benchmark, and its limits that are exceeded, one sentence each."""

    figures: dict[str, Any]
    exceeded: list[str] = field(default_factory=list)


class CannotMeasure(Exception):
    """This machine, or these arguments, allow no measurement; the message says why."""


def say(text: str) -> None:
    """Print a line on standard error, so that standard output has the JSON alone."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, object]:
    """The machine; a high load means that other programs used it too."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cores": os.cpu_count(),
        "load": [round(value, 1) for value in load] if load else None,
    }


def ratio(pairs: Iterable[tuple[float | None, float | None]]) -> dict[str, float] | None:
    """Ours / theirs over all pairs in which both were measured: the median, the lowest, the highest, how many pairs."""
    found = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
    if not found:
        return None
    low, middle, high = (round(value, 3) for value in (min(found), statistics.median(found), max(found)))
    return {"median": middle, "low": low, "high": high, "n": len(found)}
