"""The spend limit of a run: its price an hour × the time for which it has had a machine, on this one and on others.

The time is the ledger's (`monitor/ledger.py`: from events.jsonl, which travels with the run) at the start of this
monitor, and then that of its clock. The run stops before the limit: by the time that a stop with a checkpoint may take,
or by a tenth of the limit where that is less.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESERVE_SHARE = 0.1


def machine_seconds(folder: Path) -> float:
    """Seconds for which the run had a machine, up to now."""
    from monitor import ledger  # of no use to a run without a limit

    return ledger.read(folder).machine_s


class Spend:
    """What a run has cost so far."""

    def __init__(
        self, folder: Path, spec: dict[str, Any], stop_s: float, seconds: Callable[[Path], float] = machine_seconds
    ):
        """stop_s: what a stop with a checkpoint may take. seconds: for which the run had a machine, up to now."""
        self.folder, self.seconds = folder, seconds
        self.price, self.limit = _amount(spec.get("price_per_hour")), _amount(spec.get("spend_limit"))
        limit_s = self.limit / self.price * 3600 if self.price and self.limit else math.inf
        self.stop_at_s = limit_s - min(stop_s, RESERVE_SHARE * limit_s) if limit_s < math.inf else math.inf
        self._began_s: float | None = None  # monotonic: as if this monitor had watched the run from its beginning

    def used_s(self) -> float:
        """Seconds for which the run had a machine."""
        if self._began_s is None:
            self._began_s = time.monotonic() - self.seconds(self.folder)
        return time.monotonic() - self._began_s

    def reached(self) -> str:
        """Why the run must stop now; "" while it may go on, or has no limit."""
        if self.stop_at_s == math.inf or (used_s := self.used_s()) < self.stop_at_s:
            return ""
        cost = used_s / 3600 * self.price
        return (
            f"the spend limit of {self.limit:g} is reached: {cost:.2f} spent in {used_s / 3600:.2f} hours at {self.price:g} an "
            "hour, and a checkpoint takes time. Raise spend_limit in run.toml and start the run again to go on"
        )


def _amount(value: object) -> float:
    """A finite number above 0; 0.0 for everything else."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if number else 0.0  # type: ignore[arg-type]
