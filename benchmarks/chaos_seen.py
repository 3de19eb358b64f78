"""What a trial shows from outside, twenty times a second: its living trainers, and when its monitor last wrote its status.

A trainer is what has written its start to the toy's ledger. A training is watched when its monitor's lock is held and
status.json was written: each gap between two such moments, while a trainer lives, is counted.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monitor.process import platform


@dataclass
class Seen:
    """What the samples of one run show."""

    folder: Path
    at_once: int = 0
    unwatched_s: float = 0.0
    starts: dict[int, float | None] = field(default_factory=dict)  # of each trainer there was, None: it was dead
    alive: int = 0  # trainers in the last sample
    sign_s: float = 0.0
    stamp: tuple[int, int] = (0, 0)

    def sample(self, ledger: list[dict[str, Any]]) -> None:
        """Look once. ledger: its lines until now."""
        for line in ledger:
            if line["what"] == "start" and line["pid"] not in self.starts:
                self.starts[line["pid"]] = _start(line["pid"])
        alive = sum(start is not None and _start(pid) == start for pid, start in self.starts.items())
        self.note(alive, held_locks(), time.monotonic())

    def note(self, alive: int, locks: set[int] | None, now_s: float) -> None:
        """One sample: how many trainers live."""
        self.at_once = max(self.at_once, alive)
        if self._sign(locks) or not self.alive:
            self.sign_s = now_s
        if alive:
            self.unwatched_s = max(self.unwatched_s, now_s - self.sign_s)
        self.alive = alive

    def _sign(self, locks: set[int] | None) -> bool:
        """Has the monitor written status.json since the last sample, and is its lock held?"""
        try:
            found = os.stat(self.folder / "status.json")
            if locks is not None and os.stat(self.folder / "monitor.lock").st_ino not in locks:
                return False
        except OSError:
            return False
        stamp = (found.st_mtime_ns, found.st_ino)
        changed, self.stamp = stamp != self.stamp, stamp
        return changed


def _start(pid: int) -> float | None:
    """When the process was started, None when it is dead."""
    found = platform.process_info(pid)
    return None if found is None or found.dead else found.start


def held_locks() -> set[int] | None:
    """Inodes of the files that a process holds a lock on; None where the kernel does not list them."""
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return {int(line.split("->")[0].split()[-3].rpartition(":")[2]) for line in lines if "->" not in line}
