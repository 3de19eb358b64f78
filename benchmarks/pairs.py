"""Ratios of paired measurements: this checkout and another one in turns, on the same machine at the same time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import TypedDict


class Ratio(TypedDict):
    """The median of the pairs' ratios, the lowest and the highest, and how many pairs there are."""

    median: float
    low: float
    high: float
    n: int


def ratio(pairs: Iterable[tuple[float | None, float | None]]) -> Ratio | None:
    """Ours / theirs over all pairs in which both were measured; None without such a pair."""
    found = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
    if not found:
        return None
    low, middle, high = (round(value, 3) for value in (min(found), statistics.median(found), max(found)))
    return {"median": middle, "low": low, "high": high, "n": len(found)}


def worse(found: Ratio, higher_is_better: bool = False) -> bool:
    """Whether ours is worse in every pair."""
    return found["high"] < 1.0 if higher_is_better else found["low"] > 1.0


def text(found: Ratio) -> str:
    """`0.93 (0.90 to 1.02, 3 pairs)`."""
    return f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f}, {found['n']} pairs)"
