"""Restart or stop: a pure rule over the failures so far. Progress counts, not restarts.

A failure has a fingerprint (phase, step, cause). The first failure since new steps were made is answered at once:
nothing is gained by waiting, and the time from the hang to the next new step is what a user pays. After that, waiting
may help (another program's memory, a network), so 10 s, 20 s, 40 s … 300 s. The third failure with one fingerprint and
no new step ends the run, unless its ladder still has a change to try. Ten restarts in all; ten minutes of new steps
give back the ten and reset the waiting, so a run of three days with a hang an hour finishes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from monitor.config import Section

MIXED_COUNT = 2  # failures of changing fingerprints are allowed this many more than one that repeats


@dataclass(frozen=True)
class History:
    """What the rule needs to know of the past; kept in monitor.json."""

    restarts: int = 0  # since the last refund
    failures: dict[str, int] = field(default_factory=dict)  # fingerprint -> failures since the last new step
    new_steps_s: float = 0.0  # seconds of new steps since the last refund


@dataclass(frozen=True)
class Plan:
    """`stop` is the reason to end the run ("" to restart), `wait_s` how long to wait before the restart."""

    stop: str = ""
    wait_s: float = 0.0


def fingerprint(phase: str, step: int, cause: str) -> str:
    """The same failure twice has the same fingerprint."""
    return f"{phase}/{step}/{cause}"


def after_progress(history: History, seconds: float, restart: Section) -> tuple[History, bool]:
    """The history after `seconds` of new steps, and whether the full allowance of restarts was just given back."""
    new_steps_s = history.new_steps_s + seconds
    if new_steps_s < restart.refund_s or not history.restarts:
        return replace(history, new_steps_s=new_steps_s), False
    return replace(history, restarts=0, new_steps_s=0.0), True


def after_failure(
    history: History, mark: str, new_steps: bool, changes: bool, restart: Section, least_wait_s: float = 0.0
) -> tuple[History, Plan]:
    """The history after a failure, and what to do.

    Args:
        mark: the failure's fingerprint.
        new_steps: the attempt that failed got further than any before it.
        changes: the restart changes something.
        least_wait_s: what the cause needs (a full disk, a GPU that is being reset).
    """
    failures = {} if new_steps else dict(history.failures)
    failures[mark] = failures.get(mark, 0) + 1
    counted = replace(history, failures=failures)
    same, in_all = failures[mark], sum(failures.values())
    if same >= restart.without_progress_count and not changes:
        return counted, Plan(stop=f"the same failure {same} times without a new step")
    if in_all >= restart.without_progress_count + MIXED_COUNT and not changes:
        return counted, Plan(stop=f"{in_all} failures in a row without a new step")
    if history.restarts >= restart.in_all_count:
        return counted, Plan(stop=f"all {history.restarts} restarts are used up")
    wait_s = 0.0 if in_all == 1 else min(restart.backoff_first_s * 2 ** (in_all - 2), restart.backoff_last_s)
    return replace(counted, restarts=history.restarts + 1), Plan(wait_s=max(wait_s, least_wait_s))
