"""How long one kind of work takes, and the time without progress that follows from it (T).

Decision: the largest of three estimates. Five times the longest of the last 200 follows a drift and work of two speeds.
25 medians, and 1.5 times the longest that ever completed, keep a rare slow one below T. SRTT + 8 RTTVAR (RFC 6298) adds
nothing to these. Phi accrual guesses the tail of a distribution from samples that have no tail.

One estimator holds one kind of duration, by name:
    "PHASE"       seconds from entering the phase to its first item, or to its end when it has none
    "PHASE/item"  seconds from one item of the phase to the next
    "step"        seconds an optimizer step
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

from monitor.config import Section

RECENT = 200  # durations that the estimates look back on
WARM_UP = 5  # durations of a new process that do not count as the longest
OF_HIGHEST = 5  # T covers this many times the longest of the recent ones
OF_MEDIAN = 25  # healthy runs have steps of 20 medians
OF_LONGEST = 1.5  # T covers this many times the longest that ever completed
OF_PRIOR = 2  # a new attempt may be slower than the last: T is this many times what the last one had
OF_DISTURBED = 2  # a duration beside the imports of the standby attempt counts as this many medians at most
OF_CEILING = 3  # work longer than the ceiling is slow: the ceiling rises to this many times the longest


class Durations:
    """Completed durations of one kind, seconds. known: what `known()` returned in an earlier attempt or run."""

    def __init__(self, known: Mapping[str, float] | None = None):
        self._prior = dict(known or {})
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.seen = 0
        self.longest = self._prior.get("longest", 0.0)

    def add(self, values: Iterable[float], disturbed: bool = False) -> None:
        """Add completed durations, oldest first. disturbed: another process made them longer than they are."""
        limit = OF_DISTURBED * self.median if disturbed and self.median else math.inf
        for value in (min(value, limit) for value in values):
            self._recent.append(value)
            self.seen += 1
            if self.seen > WARM_UP:
                self.longest = max(self.longest, value)

    def restarted(self) -> Durations:
        """An estimator for another loop or process: it has its own pace, and the longest still counts."""
        return Durations({"longest": self.longest})

    def known(self) -> dict[str, float]:
        """What the next attempt or run needs, as plain numbers; {} when nothing is known."""
        if self.seen == 0:
            return dict(self._prior)
        n, usual_s = self.seen + self._prior.get("n", 0), OF_HIGHEST * max(self._recent)
        return {"n": n, "usual": usual_s, "longest": self.longest, "median": _median(self._recent)}

    @property
    def median(self) -> float:
        """Seconds of the usual one, 0.0 while unknown."""
        return self.known().get("median", 0.0)

    def budget(self, phase: Section, watch: Section) -> float:
        """T: seconds without progress after which the work is hung, given evidence. The ceiling while too little is known."""
        before = self._prior.get("n", 0)
        if max(self.seen, before) < watch.min_sample_count:
            return phase.ceiling_s
        known, factor = (self.known(), 1) if self.seen >= watch.min_sample_count else (self._prior, OF_PRIOR)
        wanted = factor * max(known["usual"], OF_MEDIAN * known["median"], OF_LONGEST * self.longest)
        floor_s = phase.floor_s
        if self.seen + before < watch.warm_sample_count:
            floor_s = max(floor_s, min(watch.warmup_floor_s, phase.ceiling_s))
        return min(max(wanted, floor_s), max(phase.ceiling_s, OF_CEILING * self.longest))


def _median(values: Iterable[float]) -> float:
    """Not `statistics.median`: that module brings decimal and fractions into the monitor's memory."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2
