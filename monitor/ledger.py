"""The ledger of a run: hours by state, steps trained twice, money, and what recovery saved.

A pure function of the run's files, computed where it is shown. It reads `events.jsonl` and, of a `metrics.jsonl` that
can have 150 MB, the last step of each attempt: each start of an attempt records how long that file was.

Every moment between a start and an end belongs to one state:

    loading     from the start of an attempt to its first step
    training    steps that count, with their saves and samples
    waiting     for a GPU, for the pause before a restart, and after a pre-emption for the next machine
    recovering  from the detection of a failure to the first step after it, loading again included
    lost        from the last progress to the detection; the first training of steps that had to be trained twice; and the
                time from the last trace of a run that nobody was watching any more (killed, power cut) to its next start

The pause after a completed, failed or stopped run is not part of it. Money is counted while the run has a machine: not
between two machines. Within one boot, intervals are differences of the monotonic clock; UTC is only used between boots
and machines, and for lines that earlier versions wrote without the monotonic time.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import tomllib

from monitor.phrases import count
from monitor.process import platform
from monitor.process.locks import LOCK, is_held
from monitor.run_folder import EVENTS, METRICS, STATUS, read_json
from runs.metrics_lines import count_of, is_count, json_objects, last_step

STATES = ("training", "loading", "waiting", "recovering", "lost")
ENDED = ("completed", "failed", "stopped", "paused", "unkillable")  # events: the run has ended, and a pause follows
MAX_EVENTS_BYTES = 64 << 20  # a file that came from a store can have any size
_PRICE = re.compile(rb"^price_per_hour[ \t]*=[ \t]*([0-9]+(?:\.[0-9]+)?)[ \t]*(?:#.*)?\r?$", re.M)


@dataclass
class Ledger:
    """Where the time of a run went. `seconds`: by state; their sum is the wall time of the run."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))
    unpaid_s: float = 0.0  # of `seconds`: between two machines
    steps: int = 0  # the furthest step
    repeated: int = 0  # steps that were trained twice, counted each time
    failures: int = 0  # hangs, crashes, pre-emptions, sudden ends
    recovered: int = 0  # of them: training went on
    kept_steps: int = 0  # steps that restarts did not repeat, because each began at a checkpoint
    step_s: float = 0.0  # mean time of a step, saves and samples included
    price_per_hour: float = 0.0

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def machine_s(self) -> float:
        """Seconds during which the run had a machine: what `price_per_hour` is paid for."""
        return self.wall_s - self.unpaid_s

    @property
    def kept_s(self) -> float:
        """Training time of `kept_steps`, at the mean speed of this run."""
        return self.kept_steps * self.step_s

    @property
    def cost(self) -> float | None:
        """Money so far, None without a price."""
        return self.machine_s / 3600 * self.price_per_hour if self.price_per_hour else None

    def values(self) -> dict[str, Any]:
        """For `status --json`. Hours, steps, money in the currency of the price.

        `saved`: compared with starting over at step 0 after each failure. How long a hang would have stayed unnoticed
        without a monitor is not known, and not counted.
        """
        price = self.price_per_hour / 3600
        return {
            "hours": {state: round(self.seconds[state] / 3600, 5) for state in STATES},
            "wall_hours": round(self.wall_s / 3600, 5),
            "machine_hours": round(self.machine_s / 3600, 5),
            "steps": self.steps,
            "steps_trained_twice": self.repeated,
            "failures": self.failures,
            "recovered": self.recovered,
            "price_per_hour": self.price_per_hour or None,
            "cost": round(self.cost, 4) if self.cost is not None else None,
            "saved": {
                "steps": self.kept_steps,
                "hours": round(self.kept_s / 3600, 5),
                "cost": round(self.kept_s * price, 4) if price else None,
            },
        }

    def line(self) -> str:
        """The ledger in one line."""
        parts = [f"{state} {span(self.seconds[state])}" for state in STATES if self.seconds[state] >= 0.05]
        text = f"{span(self.wall_s)}: {', '.join(parts) or 'nothing yet'}; {count(self.repeated, 'step')} trained twice"
        if self.cost is not None:
            text += f"; cost {self.cost:,.2f} at {self.price_per_hour:g} per hour"
        return f"{text}; {self.saved()}" if self.failures else text

    def saved(self) -> str:
        """What recovery saved, as a phrase."""
        text = f"{self.recovered} of {count(self.failures, 'failure')} recovered"
        if not self.kept_steps:
            return text
        money = f" ({self.kept_s / 3600 * self.price_per_hour:,.2f})" if self.price_per_hour else ""
        return f"{text}, which saved {span(self.kept_s)}{money} compared with starting over each time"


def span(seconds: float) -> str:
    """`3.2 s`, `5.2 min`, `2.25 h`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3597 else f"{seconds / 3600:,.2f} h"


def read(folder: Path, status: dict[str, Any] | None = None) -> Ledger:
    """The ledger of a run, up to now. A file that is missing or damaged costs its own part.

    Args:
        status: the run's status with "alive", where the caller has read it already.
    """
    if status is None:
        status = {**(read_json(folder / STATUS) or {}), "alive": is_held(folder / LOCK)}
    text = b""
    with contextlib.suppress(OSError), open(folder / EVENTS, "rb") as file:
        text = file.read(MAX_EVENTS_BYTES)
    metrics: BinaryIO | None = None
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            metrics = stack.enter_context(open(folder / METRICS, "rb", buffering=0))
        found = of_events(json_objects(text), metrics, status)
    found.price_per_hour = price(folder)
    return found


def price(folder: Path) -> float:
    """`price_per_hour` of `run.toml`; 0.0 without one. tomllib takes a millisecond, and a page lists 1,000 runs."""
    try:
        text = (folder / "run.toml").read_bytes()
        if (match := _PRICE.search(text)) is not None:
            return float(match[1])
        return _number(tomllib.loads(text.decode("utf-8-sig")).get("price_per_hour")) if b"price_per" in text else 0.0
    except (OSError, ValueError):
        return 0.0


@dataclass(frozen=True)
class Stamp:
    """When a line was written. `boot`: "" where it is not known; then only the UTC counts."""

    utc_s: float
    mono_s: float = 0.0
    boot: str = ""

    def until(self, later: Stamp) -> float:
        """Seconds from this moment to a later one; 0.0 when the clocks say that it was earlier."""
        same = bool(self.boot) and self.boot == later.boot
        return max(0.0, later.mono_s - self.mono_s if same else later.utc_s - self.utc_s)


@dataclass
class Attempt:
    """One start of the training. Positions are seconds since the first event."""

    start: float
    stamp: Stamp
    resumed: int  # the step that it began at
    lines: tuple[int, int] | None  # its part of metrics.jsonl, in bytes
    last_step: int
    trained_s: float = 0.0


def of_events(events: list[dict[str, Any]], metrics: BinaryIO | None, status: dict[str, Any]) -> Ledger:
    """The ledger of a run with these events; `status` is its status.json plus "alive"."""
    reading = _Reading(metrics)
    for number, event in enumerate(events):
        stamp = _stamp(event)
        if stamp is not None:
            reading.event(event, stamp, _next_offset(events, number))
    reading.finish(status)
    return reading.ledger


class _Reading:
    """Goes through the events once. `mark`: the position up to which the time belongs to a state."""

    def __init__(self, metrics: BinaryIO | None):
        self.metrics = metrics
        self.ledger = Ledger()
        self.now, self.mark = 0.0, 0.0
        self.state = ""  # what the time goes to from `mark` on; "": a pause that is not part of the run
        self.paid = True  # the run has a machine
        self.seen = 0.0  # the position of the last event before this one, on the machine of the attempt
        self.last: Stamp | None = None  # of the last event
        self.pending = 0  # failures that no later step has answered yet
        self.attempt: Attempt | None = None  # the one that runs
        self.before: Attempt | None = None  # the one before
        self.step_total, self.step_time = 0, 0.0

    def until(self, position: float, state: str = "") -> None:
        """The time up to `position` belongs to `state`, or to the current one."""
        taken, state = max(0.0, position - self.mark), state or self.state
        self.mark += taken
        if state:
            self.ledger.seconds[state] += taken
            self.ledger.unpaid_s += 0.0 if self.paid else taken
        if state == "training" and self.attempt is not None:
            self.attempt.trained_s += taken

    def event(self, event: dict[str, Any], stamp: Stamp, next_offset: int | None) -> None:
        kind, attempt = event.get("kind"), self.attempt
        here = attempt is None or attempt.stamp.boot == stamp.boot
        if self.last is not None and attempt is not None and self.last.boot != stamp.boot:
            self.now, self.last = self.newest(attempt, self.now, self.last)
        if here:
            self.seen = self.now
        self.now += self.last.until(stamp) if self.last else 0.0
        self.last = stamp
        if kind in ENDED and not here:
            self.vanished(self.now, paid=False)
        if kind in ("started", "restarted") and is_count(event.get("attempt")):
            self.starts(event, stamp, next_offset)
        elif kind in ENDED or kind == "preempted":
            self.ends(kind)
        elif kind == "backoff" and self.state == "recovering" and attempt is None:
            self.until(self.now)
            self.state = "waiting"
        elif attempt is not None and kind in ("hang", "crash") and "step" in event:
            attempt.last_step = max(attempt.last_step, count_of(event["step"]))
            self.until(self.now - max(0.0, _number(event.get("since_s"))))
            self.until(self.now, "lost")
            self.close(failed=True)
            self.state = "recovering"
        elif attempt is not None and kind in ("phase", "checkpoint"):
            attempt.last_step = max(attempt.last_step, count_of(event.get("step")))
            if event.get("phase") in ("first_step", "step"):
                self.until(self.now)
                self.state = "training"

    def newest(self, attempt: Attempt, position: float, stamp: Stamp) -> tuple[float, Stamp]:
        """(position, stamp) of the attempt's last line of metrics.jsonl where that is newer than this position.

        The trainer runs on the machine, and in the boot, of its attempt's start.
        """
        line = self.last_line(attempt)
        written = _stamp({**line, "boot": attempt.stamp.boot})
        at = attempt.start + attempt.stamp.until(written) if written is not None else 0.0
        return (at, written) if written is not None and at > position else (position, stamp)

    def last_line(self, attempt: Attempt) -> dict[str, Any]:
        """The attempt's last step in metrics.jsonl; {} for none."""
        if self.metrics is None or attempt.lines is None:
            return {}
        return last_step(self.metrics, *attempt.lines) or {}

    def vanished(self, until: float, paid: bool) -> None:
        """Nobody saw the end of the attempt; the next trace of the run is at `until`."""
        attempt = self.attempt
        if attempt is None:
            return
        self.until(min(self.newest(attempt, self.seen, attempt.stamp)[0], until))
        self.paid = paid
        self.until(until, "lost")
        self.paid = True
        self.close(failed=True)

    def starts(self, event: dict[str, Any], stamp: Stamp, next_offset: int | None) -> None:
        """An attempt starts."""
        queued = self.now - max(0.0, _number(event.get("waited_s")))  # the monitor came then, and waited for a GPU
        if self.attempt is not None:
            self.vanished(queued, paid=bool(stamp.boot) and self.attempt.stamp.boot == stamp.boot)
        elif not self.now:  # before the first event, positions are negative
            self.mark = queued
        else:
            self.until(self.now if self.state and self.paid else queued)
        self.paid = True
        self.until(self.now, "waiting")
        resumed, begin = count_of(event.get("step")), event.get("metrics_bytes")
        if self.before is not None:
            self.repeat(self.before, resumed)
        if self.pending:
            self.ledger.kept_steps += resumed
        lines = (count_of(begin), next_offset if next_offset is not None else self.size()) if is_count(begin) else None
        self.attempt = Attempt(self.now, stamp, resumed, lines, last_step=resumed)
        self.state = "recovering" if self.pending else "loading"

    def size(self) -> int:
        return os.fstat(self.metrics.fileno()).st_size if self.metrics is not None else 0

    def ends(self, kind: str) -> None:
        """The run reaches a final state."""
        self.until(self.now)
        if self.attempt is not None:
            self.close(failed=kind == "preempted", completed=kind == "completed")
        self.paid = kind != "preempted"
        self.state = "" if self.paid else "waiting"
        if self.paid:
            self.pending = 0  # what the user starts later is no recovery

    def close(self, failed: bool, completed: bool = False) -> None:
        """The attempt is over."""
        assert self.attempt is not None
        self.tally(self.attempt, completed)
        self.before, self.attempt = self.attempt, None
        if failed:
            self.ledger.failures += 1
            self.pending += 1

    def tally(self, attempt: Attempt, completed: bool = False) -> None:
        """Count the attempt's steps so far."""
        attempt.last_step = max(attempt.last_step, count_of(self.last_line(attempt).get("step")))
        self.ledger.steps = max(self.ledger.steps, attempt.last_step)
        if attempt.trained_s:
            self.step_total += attempt.last_step - attempt.resumed
            self.step_time += attempt.trained_s
        if self.pending and (completed or attempt.last_step > attempt.resumed):
            self.ledger.recovered += self.pending
            self.pending = 0

    def repeat(self, attempt: Attempt, resumed: int) -> None:
        """The next attempt resumes at `resumed`: what `attempt` trained after that step was lost."""
        lost, made = attempt.last_step - resumed, attempt.last_step - attempt.resumed
        self.before = None
        if lost > 0:
            self.ledger.repeated += lost
            moved = min(attempt.trained_s * min(1.0, lost / max(made, 1)), self.ledger.seconds["training"])
            self.ledger.seconds["training"] -= moved
            self.ledger.seconds["lost"] += moved

    def finish(self, status: dict[str, Any]) -> None:
        """The time from the last event to now, or to the last trace of a run that is not watched."""
        alive = bool(status.get("alive"))
        moment = platform.now()
        now = Stamp(moment.wall_s, moment.mono_s, platform.boot_id()[:8])
        end = now if alive else _stamp({"t": status.get("updated_at")})
        if self.last is None:
            if alive and (began := _stamp({"t": status.get("started_at")})) is not None:
                self.until(began.until(now), "waiting")  # for a GPU, since the start
            return
        position = self.now + (self.last.until(end) if end is not None else 0.0)
        if self.attempt is not None:
            self.until(position if alive else self.newest(self.attempt, position, self.last)[0])
            self.tally(self.attempt)
        elif self.paid:
            self.until(position)
        if self.step_total:
            self.ledger.step_s = self.step_time / self.step_total


def _number(value: object) -> float:
    """A number of a sensible size; 0.0 for everything else: JSON from elsewhere can hold 1e999 and a thousand digits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        return 0.0
    return float(value)


def _stamp(line: dict[str, Any]) -> Stamp | None:
    """When a line was written; None for a line without a time."""
    try:
        utc_s = datetime.fromisoformat(str(line.get("t")).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    boot, mono = line.get("boot"), line.get("mono_s")
    known = isinstance(boot, str) and isinstance(mono, int | float)
    return Stamp(utc_s, _number(mono), str(boot) if known else "")


def _next_offset(events: list[dict[str, Any]], number: int) -> int | None:
    """Where the lines of the next attempt begin in metrics.jsonl; None for the last attempt."""
    if events[number].get("kind") not in ("started", "restarted"):
        return None
    later = (e["metrics_bytes"] for e in events[number + 1 :] if is_count(e.get("metrics_bytes")))
    return next(later, None)
