"""The ledger of a run: hours by state, steps trained twice, money, and what recovery saved.

The monitor keeps it while it watches: each turn gives the time since the last one to the state of then. It is a part of
the RunState (`monitor.json`, which travels with the run), and `status.json` has a copy of each second; everybody else
only reads that. The next monitor goes on from the copy that knows more.

Every moment between a start and an end belongs to one state:

    loading     from the start of an attempt to its first step
    training    steps that count, with their saves and samples
    waiting     for a GPU, for the pause before a restart, and after a pre-emption for the next machine
    recovering  from the detection of a failure to the first step after it, loading again included
    lost        from the last progress to the detection; the first training of steps that were trained twice; and the
                time from the last trace of a run on a machine or in a container that was switched off to its next start

The pause after a completed, failed or stopped run is not part of it. Money is counted while the run has a machine: not
between two machines. Within one boot, intervals are differences of the monotonic clock; UTC is only used between boots
and machines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from monitor.phrases import count, duration
from monitor.process import platform
from runs.files import SENSIBLE, typed

STATES = ("training", "loading", "waiting", "recovering", "lost")
RESERVE_SHARE = 0.1  # of a spend limit: kept for the checkpoint at the end, where that takes longer


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
    made_steps: int = 0  # steps of all attempts, and the training time that they took, saves and samples included
    made_s: float = 0.0
    price_per_hour: float = 0.0
    charged: float = 0.0  # money for the first `charged_s` of `machine_s`, which had another price
    charged_s: float = 0.0
    state: str = ""  # what the time from now on belongs to; "": a pause that is not part of the run
    paid: bool = True  # the run has a machine
    pending: int = 0  # failures that no later step has answered yet
    resumed: int = 0  # of the attempt, or the one before: where it began, its last step, its training time
    step: int = 0
    attempt_s: float = 0.0
    utc_s: float = 0.0  # up to here, the time belongs to a state
    mono_s: float = 0.0
    boot: str = ""

    @classmethod
    def of(cls, values: dict[str, Any] | None) -> Ledger:
        """The ledger in the values of `status.json` or `monitor.json`; an empty one without, and where it is
        damaged: a file that came from a store can hold anything."""
        try:
            found: Ledger = typed(cls, (values or {}).get("ledger") or {})
        except (TypeError, ValueError):
            return cls()
        numbers = [*vars(found).values(), *found.seconds.values()]
        if found.state not in ("", *STATES) or any(isinstance(one, int | float) and one < 0 for one in numbers):
            return cls()
        found.seconds = {state: found.seconds.get(state, 0.0) for state in STATES}
        return found

    # ---- the monitor writes it ----

    def passes(self, state: str) -> None:
        """The time until now belongs to the state so far, and from now on to `state`."""
        now, boot = platform.now(), platform.boot_id()
        same = bool(boot) and self.boot == boot
        passed_s = max(0.0, now.mono_s - self.mono_s if same else now.wall_s - self.utc_s)
        if self.state:
            self.seconds[self.state] += passed_s
            self.unpaid_s += 0.0 if self.paid else passed_s
        if self.state == "training":
            self.attempt_s += passed_s
            self.made_s += passed_s
        self.state, self.utc_s, self.mono_s, self.boot = state, now.wall_s, now.mono_s, boot

    def follows(self, price_per_hour: float) -> None:
        """Another monitor goes on, at this price. While the machine or container was switched off, nobody trained."""
        same = self.boot == platform.boot_id() and self.mono_s <= platform.now().mono_s
        self.paid = self.paid and same
        if not same and self.state not in ("", "waiting"):
            self.state = "lost"
            self.passes("recovering")
            self.fails(0.0)
        else:
            self.passes(self.state)
        self.paid = True
        if self.price_per_hour not in (0.0, price_per_hour):
            self.charged, self.charged_s = self.cost or 0.0, self.machine_s
        self.price_per_hour = price_per_hour

    def starts(self, resumed: int) -> None:
        """The next attempt begins after step `resumed`: what was trained beyond that is trained twice."""
        again = self.step - resumed
        if again > 0:
            self.repeated += again
            self._lose("training", self.attempt_s * min(1.0, again / max(self.step - self.resumed, 1)))
        if self.pending:
            self.kept_steps += resumed
        self.resumed = self.step = resumed
        self.attempt_s = 0.0

    def reaches(self, step: int) -> None:
        """The attempt has completed this step."""
        if step > self.step:
            self.made_steps += step - self.step
            self.step, self.steps = step, max(self.steps, step)
            self.recovered, self.pending = self.recovered + self.pending, 0

    def fails(self, since_s: float) -> None:
        """The attempt has failed, `since_s` seconds after its last progress."""
        self.passes(self.state)
        since_s = min(since_s, self.attempt_s) if self.state == "training" else since_s
        self._lose(self.state, since_s)
        if self.state == "training":
            self.attempt_s -= since_s
            self.made_s -= since_s
        self.failures, self.pending, self.state = self.failures + 1, self.pending + 1, "recovering"

    def ends(self, preempted: bool, completed: bool) -> None:
        """The run has ended here. preempted: it goes on elsewhere, and waits for that without a machine."""
        if preempted and self.state in ("loading", "training"):
            self.fails(0.0)
        self.recovered += self.pending if completed else 0
        self.passes("waiting" if preempted else "")
        self.paid = not preempted
        if not preempted:
            self.pending = 0  # what the user starts later is no recovery

    def _lose(self, state: str, seconds: float) -> None:
        """This much of the time in a state was lost."""
        moved = min(seconds, self.seconds.get(state, 0.0))
        if moved:
            self.seconds[state] -= moved
            self.seconds["lost"] += moved

    # ---- everybody reads it ----

    @property
    def wall_s(self) -> float:
        """Seconds of the run so far."""
        return sum(self.seconds.values())

    @property
    def machine_s(self) -> float:
        """Seconds during which the run had a machine: what `price_per_hour` is paid for."""
        return self.wall_s - self.unpaid_s

    @property
    def kept_s(self) -> float:
        """Training time of `kept_steps`, at the mean speed of this run."""
        return self.kept_steps * self.made_s / self.made_steps if self.made_steps else 0.0

    @property
    def cost(self) -> float | None:
        """Money so far, None without a price."""
        since = (self.machine_s - self.charged_s) / 3600 * self.price_per_hour
        return self.charged + since if self.price_per_hour else None

    @property
    def rate(self) -> str:
        """The price, as a phrase."""
        return f"{'now ' if self.charged else ''}at {self.price_per_hour:g} per hour"

    def over(self, limit: float, stop_s: float) -> str:
        """Why the run must stop before it costs more than `limit`; "" while it may go on, or has no limit or price.

        It stops earlier by `stop_s`, which a stop with a checkpoint takes, or by a tenth of the limit if that is less.
        """
        cost, reserve = self.cost, min(stop_s / 3600 * self.price_per_hour, RESERVE_SHARE * limit)
        if cost is None or not limit or cost < limit - reserve:
            return ""
        return (
            f"the spend limit of {limit:g} is reached: {cost:.2f} spent in {self.machine_s / 3600:.2f} hours "
            f"{self.rate}, and a checkpoint takes time. Raise spend_limit in run.toml and start the run again to go on"
        )

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
        parts = [f"{state} {duration(self.seconds[state])}" for state in STATES if self.seconds[state] >= 0.05]
        spent = f"; cost {self.cost:,.2f} {self.rate}" if self.cost is not None else ""
        saved = f"; {self.saved()}" if self.failures else ""
        twice = f"{count(self.repeated, 'step')} trained twice"
        return f"{duration(self.wall_s)}: {', '.join(parts) or 'nothing yet'}; {twice}{spent}{saved}"

    def saved(self) -> str:
        """What recovery saved, as a phrase."""
        text = f"{self.recovered} of {count(self.failures, 'failure')} recovered"
        if not self.kept_steps:
            return text
        money = f" ({self.kept_s / 3600 * self.price_per_hour:,.2f})" if self.price_per_hour else ""
        return f"{text}, which saved {duration(self.kept_s)}{money} compared with starting over each time"


def amount(value: object) -> float:
    """A number above 0 of a sensible size; 0.0 for all else: JSON from elsewhere can hold 1e999 or many digits."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < SENSIBLE
    return float(value) if number else 0.0  # type: ignore[arg-type]
