"""What is learned of how long things take, and the budget that follows from it.

Decision: three estimates, the largest wins. Five times the longest of the last 200 follows a run whose steps come in two
speeds; SRTT + 8 x RTTVAR (the smoothed time and its mean deviation, as in RFC 6298) follows one that drifts; 25 medians
and one and a half times the longest that ever ended by itself keep the rare healthy outlier from being taken for a hang.
A learned probability (phi accrual) was not taken: its tail is a guess from the very samples that have no tail in them.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

from monitor.limits import Phase, Watching

RECENT = 200
WARM_UP = 5


class Durations:
    """Completed intervals of one kind (a step, an image cached, a save), seconds."""

    def __init__(self, known: dict | None = None):
        """`known` is what `known()` of an earlier run or attempt returned."""
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.seen = 0  # in this process
        self.longest = 0.0
        self._srtt = self._rttvar = 0.0
        self._prior = dict(known or {})
        self._highest = self._median = 0.0
        self._stale = True

    def add(self, values: Iterable[float]) -> None:
        """Take completed intervals, oldest first. The first few are warm-up and are never "the longest ever"."""
        for value in values:
            if self.seen == 0:
                self._srtt, self._rttvar = value, value / 2
            else:
                self._rttvar += 0.25 * (abs(self._srtt - value) - self._rttvar)
                self._srtt += 0.125 * (value - self._srtt)
            self.seen += 1
            self._recent.append(value)
            if self.seen > WARM_UP:
                self.longest = max(self.longest, value)
            self._stale = True

    def known(self) -> dict:
        """What to keep for the next attempt or run, as plain numbers."""
        if self.seen == 0:
            return self._prior
        highest, median = self._summary()
        return {
            "n": self.seen + self._prior.get("n", 0),
            "usual": self._estimate(highest),
            "longest": max(self.longest, self._prior.get("longest", 0.0)),
            "median": median,
        }

    @property
    def median(self) -> float:
        """Seconds of the usual one, 0.0 while unknown."""
        return self._summary()[1] if self.seen else self._prior.get("median", 0.0)

    def budget(self, phase: Phase, watching: Watching) -> float:
        """Seconds without progress after which a hang is declared when a second signal agrees (T)."""
        prior = self._prior if self._prior.get("n", 0) >= watching.few else {}
        if self.seen < watching.few:
            if not prior:
                return phase.ceiling
            # An attempt that has just begun may be slower than the one it follows: twice what that one was given.
            wanted = 2 * max(
                prior["usual"],
                watching.median_times * prior["median"],
                watching.longest_times * max(prior["longest"], self.longest),
            )
        else:
            highest, median = self._summary()
            wanted = max(
                self._estimate(highest),
                watching.median_times * median,
                watching.longest_times * max(self.longest, prior.get("longest", 0.0)),
            )
        floor = phase.floor
        if self.seen + prior.get("n", 0) < watching.well_known:
            floor = max(floor, min(watching.young_floor, phase.ceiling))
        # A run whose steps take longer than the ceiling is slow, not stuck: the ceiling gives way to what was seen.
        ceiling = max(phase.ceiling, 3 * max(self.longest, prior.get("longest", 0.0)))
        return min(max(wanted, floor), ceiling)

    def _estimate(self, highest: float) -> float:
        return max(5 * highest, self._srtt + 8 * self._rttvar)

    def _summary(self) -> tuple[float, float]:
        """Longest and median of the recent ones; worked out again only when there are new ones."""
        if self._stale and self._recent:
            self._highest = max(self._recent)
            # The median moves slowly: at twenty steps a second it need not be found anew at each.
            if self._median == 0.0 or self.seen <= RECENT or self.seen % 20 == 0:
                self._median = statistics.median(self._recent)
            self._stale = False
        return self._highest, self._median
