"""Are the steps slower than this run's usual ones? A pure decision over the durations of steps.

Decision: nearly all steps of a window of `window_s` seconds and six steps, not their mean. One slow step (a sample, a
save, the start of an epoch's workers, a laptop that slept) changes a mean and decides nothing here. The limit is above
the run's own median and above its slowest twentieth: a run with images of several sizes has steps of several speeds.
What is usual comes from all steps since the run began, thinned out evenly, and of these from the first half: a speed
that falls slowly must not become the usual one. Steps of a slow time never count as usual.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

FACTOR, ABOVE_SLOWER = 2.0, 1.25  # slow: this many times the median, and this many times the slowest twentieth
BACK, BACK_SLOWER = 1.4, 1.1  # usual again: below these
AT_START = 3.0  # slow, while only the rehearsal's or an earlier pace is known
SHARE = 0.8  # of the window's steps
# so many steps in a row, each so many times above the median and the slowest fiftieth
SEVERE, ABOVE_SLOWEST, SEVERE_STEPS = 5.0, 2.0, 3
MIN_STEPS = 6  # of a window
WARM_STEPS = 10  # before the run's own pace is known
KEPT = 512
SLOW, OVER = "slow", "over"


class Pace:
    """The pace of one run. expected_s: seconds of a step by the rehearsal or an earlier attempt, 0.0 without one."""

    def __init__(self, window_s: float, expected_s: float = 0.0):
        self._window_s, self._expected_s = window_s, expected_s
        self._usual: list[float] = []  # every `_stride`th step that was not slow
        self._stride, self._skipped = 1, 0
        self._window: deque[float] = deque()
        self._median = self._slower = self._slowest = 0.0  # of `_usual`: the middle, the 95th and the 98th percent
        self.slow = False
        self.lost_s = 0.0  # by the slow time so far

    @property
    def own(self) -> bool:
        """Whether the usual pace is measured in this attempt, and not expected."""
        return self._median > 0

    @property
    def usual_s(self) -> float:
        """Seconds of the usual step, 0.0 while nothing is known."""
        return self._median or self._expected_s

    @property
    def steps(self) -> int:
        """The number of steps in the window."""
        return len(self._window)

    def now_s(self, under_way_s: float = 0.0) -> float:
        """Seconds of the window's middle step."""
        found = sorted([*self._window, *([under_way_s] if under_way_s else [])])
        return found[len(found) // 2] if found else 0.0

    @property
    def window_s(self) -> float:
        """Seconds that the window's steps took."""
        return sum(self._window)

    def forget(self) -> None:
        """Something stopped the training for a while (a suspend): the window starts over."""
        self._window.clear()

    def limit_s(self, factor: float = FACTOR, above_slower: float = ABOVE_SLOWER) -> float:
        """Seconds above which a step is slow; 0.0 while nothing is known."""
        if not self.own:
            return AT_START * self._expected_s
        return max(factor * self._median, above_slower * self._slower)

    def observe(self, steps: Iterable[float], under_way_s: float = 0.0) -> str:
        """SLOW when the slow time begins, OVER when it ends, else "".

        Args:
            steps: durations of the steps completed since the last call, oldest first. under_way_s: of the one not complete.
        """
        for step_s in steps:
            self._window.append(step_s)
            if self.slow:
                self.lost_s += max(0.0, step_s - self.usual_s)
            while len(self._window) > MIN_STEPS and sum(self._window) - self._window[0] >= self._window_s:
                self._learn(self._window.popleft())
        limit_s = self.limit_s()
        # The step under way counts once it is slow: it can last for minutes.
        current = [under_way_s] if limit_s and under_way_s > limit_s else []
        window = [*self._window, *current][-max(MIN_STEPS, len(self._window)) :]
        last = window[-SEVERE_STEPS:]
        severe_s = max(SEVERE * self.usual_s, ABOVE_SLOWEST * self._slowest)
        severe = len(last) == SEVERE_STEPS and min(last) > severe_s and sum(last) >= self._window_s
        complete = len(window) >= MIN_STEPS and sum(window) >= self._window_s
        if not limit_s or not (complete or severe):
            return ""
        if not self.slow and (severe or sum(s > limit_s for s in window) >= SHARE * len(window)):
            self.slow, self.lost_s = True, sum(max(0.0, s - self.usual_s) for s in window)
            while self._window and self._window[0] <= limit_s:  # from before: three long steps need no whole window
                self._window.popleft()
            return SLOW
        back_s = self.limit_s(BACK, BACK_SLOWER) if self.own else FACTOR * self._expected_s
        if self.slow and sum(s <= back_s for s in window) >= SHARE * len(window):
            self.slow = False
            self._window.clear()
            return OVER
        return ""

    def _learn(self, step_s: float) -> None:
        """A step has left the window: it is a usual one, unless the run is slow."""
        self._skipped += 1
        if self.slow or self._skipped < self._stride:
            return
        self._skipped = 0
        self._usual.append(step_s)
        if len(self._usual) > KEPT:
            self._usual, self._stride = self._usual[::2], 2 * self._stride
        if len(self._usual) >= WARM_STEPS and len(self._usual) % (1 + len(self._usual) // 32) == 0:
            ordered = sorted(self._usual[: max(WARM_STEPS, len(self._usual) // 2)])
            self._median, self._slower, self._slowest = (ordered[int(len(ordered) * x)] for x in (0.5, 0.95, 0.98))
