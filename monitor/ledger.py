"""The ledger of a run: hours by state, steps trained twice, money, and what recovery saved.

A pure function of `events.jsonl` and the status, computed where it is shown. Each interval between two events goes to
the state that the first of them began; the event of a start names the last trace of an attempt whose end nobody saw.

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
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import tomllib

from monitor.phrases import count
from monitor.process import platform
from monitor.process.locks import LOCK, is_held
from monitor.run_folder import EVENTS, STATUS, read_json
from runs.metrics_lines import count_of, is_count, json_objects

STATES = ("training", "loading", "waiting", "recovering", "lost")
ENDED = ("completed", "failed", "stopped", "paused", "unkillable")  # events: the run has ended, and a pause follows
MAX_EVENTS_BYTES = 64 << 20  # a file that came from a store can have any size


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
    reading = _Reading()
    for event in json_objects(text):
        reading.event(event)
    reading.finish(status)
    reading.ledger.price_per_hour = price(folder)
    return reading.ledger


def price(folder: Path) -> float:
    """`price_per_hour` of `run.toml`; 0.0 without one."""
    try:
        text = (folder / "run.toml").read_text(encoding="utf-8-sig")
        return _number(tomllib.loads(text).get("price_per_hour")) if "price_per_hour" in text else 0.0
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


class _Reading:
    """Goes through the events once."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.last: Stamp | None = None  # up to here, the time belongs to a state
        self.state = ""  # what the time after it belongs to; "": a pause that is not part of the run
        self.paid = True  # the run has a machine
        self.pending = 0  # failures that no later step has answered yet
        self.runs = False  # an attempt does, and of it or the one before: where it began, its last step, training time
        self.resumed = self.step = 0
        self.trained_s = self.step_time = 0.0
        self.step_total = 0

    def take(self, seconds: float, state: str, paid: bool = True) -> None:
        """This much time belongs to a state."""
        if state:
            self.ledger.seconds[state] += seconds
            self.ledger.unpaid_s += 0.0 if paid else seconds
        if state == "training":
            self.trained_s += seconds

    def event(self, event: dict[str, Any]) -> None:
        """Give the time since the last event to its state, and begin the next state."""
        kind, stamp = event.get("kind"), _stamp(event)
        started = kind in ("started", "restarted") and is_count(event.get("attempt"))
        failed = kind in ("hang", "crash") and "step" in event and self.runs
        ends = kind in ENDED or kind == "preempted"
        if self.runs and (failed or ends or kind in ("phase", "checkpoint")):
            self.step = max(self.step, count_of(event.get("step")), count_of(event.get("reached")))
        waits = kind == "backoff" and self.state == "recovering" and not self.runs
        trains = self.runs and event.get("phase") in ("first_step", "step") and kind == "phase"
        if stamp is None or not (started or failed or ends or waits or trains):
            return
        same = self.last is None or self.last.boot == stamp.boot
        passed = self.last.until(stamp) if self.last is not None else 0.0
        if started:
            self.starts(event, stamp, passed, same)
        elif failed:
            lost = min(passed, max(0.0, _number(event.get("since_s"))))
            self.take(passed - lost, self.state)
            self.take(lost, "lost")
            self.close(failed=True)
            self.state = "recovering"
        elif self.runs and ends and not same:
            self.take(passed, "lost", paid=False)
            self.close(failed=True)
        else:
            self.take(passed, self.state, self.paid)
            self.state = "waiting" if waits else "training" if trains else self.state
        self.last = stamp
        if ends:
            if self.runs:
                self.close(failed=kind == "preempted", completed=kind == "completed")
            self.paid = kind != "preempted"
            self.state = "" if self.paid else "waiting"
            if self.paid:
                self.pending = 0  # what the user starts later is no recovery

    def starts(self, event: dict[str, Any], stamp: Stamp, passed: float, same: bool) -> None:
        """An attempt starts, `passed` seconds after the last event. same: in the boot of that."""
        waited = max(0.0, _number(event.get("waited_s")))  # the monitor came then, and waited for a GPU
        known = event.get("before")  # the last trace of what ran before
        if self.runs and self.last is not None:  # nobody saw its end
            trace = _stamp({**known, "boot": self.last.boot}) if isinstance(known, dict) else None
            seen = self.last.until(trace) if trace is not None else 0.0
            self.step = max(self.step, count_of(known.get("step")) if isinstance(known, dict) and seen else 0)
            self.take(seen, self.state)
            left = trace.until(stamp) if trace is not None and seen else passed
            self.take(max(0.0, left - waited), "lost", paid=bool(stamp.boot) and same)
            self.close(failed=True)
        elif self.last is not None:
            waited = min(waited, passed)
            self.take(passed - waited, self.state, self.paid)
        self.paid = True
        self.take(waited, "waiting")
        resumed = count_of(event.get("step"))
        self.repeat(resumed)
        if self.pending:
            self.ledger.kept_steps += resumed
        self.runs, self.resumed, self.step, self.trained_s = True, resumed, resumed, 0.0
        self.state = "recovering" if self.pending else "loading"

    def close(self, failed: bool, completed: bool = False) -> None:
        """The attempt is over."""
        self.tally(completed)
        self.runs = False
        self.ledger.failures += failed
        self.pending += failed

    def tally(self, completed: bool = False) -> None:
        """Count the attempt's steps so far."""
        self.ledger.steps = max(self.ledger.steps, self.step)
        if self.trained_s:
            self.step_total += self.step - self.resumed
            self.step_time += self.trained_s
        if self.pending and (completed or self.step > self.resumed):
            self.ledger.recovered += self.pending
            self.pending = 0

    def repeat(self, resumed: int) -> None:
        """The next attempt resumes at `resumed`: what was trained after that step was lost."""
        lost, made = self.step - resumed, self.step - self.resumed
        if lost > 0:
            self.ledger.repeated += lost
            moved = min(self.trained_s * min(1.0, lost / max(made, 1)), self.ledger.seconds["training"])
            self.ledger.seconds["training"] -= moved
            self.ledger.seconds["lost"] += moved

    def finish(self, status: dict[str, Any]) -> None:
        """The time from the last event to now, or to the last status of a run that is not watched."""
        moment = platform.now()
        end: Stamp | None = Stamp(moment.wall_s, moment.mono_s, platform.boot_id()[:8])
        if not status.get("alive"):
            end = _stamp({**status, "t": status.get("updated_at"), "mono_s": status.get("updated_mono_s")})
        began = self.last or (_stamp({"t": status.get("started_at")}) if status.get("alive") else None)
        if end is not None and began is not None and self.paid:
            # Without an event, it waits for a GPU since its start.
            self.take(began.until(end), self.state if self.last is not None else "waiting")
        if self.runs:
            self.step = max(self.step, count_of(status.get("step")) if self.state == "training" else 0)
            self.tally()
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
