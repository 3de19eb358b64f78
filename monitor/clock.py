"""Two clocks that never mix: monotonic seconds for every interval, UTC text for people.

The boot clock goes on during suspend and the monotonic one does not; the difference tells a suspend from a stall.
`HANGPROOF_CLOCK` names a JSON file {"boot": seconds, "wall": seconds} that is added to the clocks, so that tests can put
a suspend or a wrongly set clock in front of the real process.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from datetime import datetime, timezone

from monitor import system


@dataclass(frozen=True)
class Moment:
    """One reading of all three clocks, in seconds."""

    mono_s: float
    boot_s: float
    wall_s: float

    @property
    def utc(self) -> str:
        return utc(self.wall_s)


def utc(wall_s: float) -> str:
    """UTC, ISO 8601, milliseconds."""
    return datetime.fromtimestamp(wall_s, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def now() -> Moment:
    """Read the clocks."""
    path = os.environ.get("HANGPROOF_CLOCK")
    offsets = {}
    if path:
        try:
            with open(path, encoding="utf-8") as file:
                offsets = json.load(file)
        except (OSError, ValueError):
            offsets = {}  # not there yet, or being written
    return Moment(
        time.monotonic(),
        system.boot_seconds() + offsets.get("boot", 0.0),
        time.time() + offsets.get("wall", 0.0),
    )
