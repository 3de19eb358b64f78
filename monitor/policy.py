"""Restart or stop: a pure rule over what has failed so far. Progress counts, not restarts.

A failure has a fingerprint (phase, step, cause). The first failure since new steps were made is answered at once: there is
nothing to wait for, and hang → next new step is what a user pays. After that waiting is what may help (another program's
memory, a network), so 10 s, 20 s, 40 s … 300 s. The third failure of one fingerprint without a new step ends the run,
unless its ladder still has something to change. Ten restarts in all; ten minutes of new steps give back both the ten and
the waiting, so that a run of three days with a hang an hour finishes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from monitor.limits import Restart

MIXED = 2  # failures of changing fingerprints get this many more than one that repeats


@dataclass
class History:
    """What the rule needs to know of the past; kept in monitor.json."""

    restarts: int = 0  # since the last refund
    seen: dict[str, int] = field(default_factory=dict)  # fingerprint -> failures since the last new step
    new_steps_s: float = 0.0  # seconds of new steps since the last refund

    def progressed(self, seconds: float, restart: Restart) -> bool:
        """New steps were made for `seconds`; True when that gave the allowance back."""
        self.new_steps_s += seconds
        if self.new_steps_s < restart.refund or not self.restarts:
            return False
        self.restarts = 0
        self.new_steps_s = 0.0
        return True


@dataclass(frozen=True)
class Plan:
    """`stop` is why the run ends ("" to restart), `wait_s` how long before the restart."""

    stop: str = ""
    wait_s: float = 0.0


def fingerprint(phase: str, step: int, cause: str) -> str:
    """The same failure twice has the same fingerprint."""
    return f"{phase}/{step}/{cause}"


def after_failure(
    history: History, mark: str, new_steps: bool, changes: bool, restart: Restart, least_wait_s: float = 0.0
) -> Plan:
    """Decide, and write the failure into `history`.

    Args:
        new_steps: the attempt that failed got beyond what any before it reached. changes: something will be changed.
        least_wait_s: a cause may need time (a full disk, a GPU that is being reset).
    """
    if new_steps:
        history.seen.clear()
    history.seen[mark] = history.seen.get(mark, 0) + 1
    same, failures = history.seen[mark], sum(history.seen.values())
    if same >= restart.without_progress and not changes:
        return Plan(stop=f"the same failure {same} times without one new step")
    if failures >= restart.without_progress + MIXED and not changes:
        return Plan(stop=f"{failures} failures in a row without one new step")
    if history.restarts >= restart.in_all:
        return Plan(stop=f"all {history.restarts} restarts are spent")
    history.restarts += 1
    if failures == 1:
        return Plan(wait_s=least_wait_s)
    wait = min(restart.backoff_first * 2 ** (failures - 2), restart.backoff_last)
    return Plan(wait_s=max(wait, least_wait_s))
