"""Who is alive, twenty times a second: the trainers of each run, and when its monitor last wrote its status.

One thread samples for all runs. A run is known by the token in the environment of its processes. A training is
watched when its monitor's lock is held and status.json was written: each gap between two such moments, while a
trainer lives, is counted.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.trial import TOKEN, variables_of, waits
from monitor.process import platform

SAMPLE_S = 0.05
RESCAN_S = 1.0  # a process without a token is looked at again after this long: its number may be used anew


@dataclass
class Seen:
    """What the samples of one run show."""

    folder: Path
    at_once: int = 0
    unwatched_s: float = 0.0
    alive: dict[int, float] = field(default_factory=dict)  # pid -> start, of the living trainers
    monitors: int = 0  # living processes of `monitor run`, the keeper included
    sign_s: float = 0.0
    stamp: tuple[int, int] = (0, 0)

    def trainers(self) -> list[int]:
        """The trainers alive now."""
        return [pid for pid, start in dict(self.alive).items() if _start(pid) == start]

    def note(self, alive: dict[int, float], locks: set[int] | None, now_s: float) -> None:
        """One sample."""
        if len(alive) > self.at_once:
            together = sum(_start(pid) == start for pid, start in alive.items())  # at one moment, not in one sweep
            self.at_once = max(self.at_once, together)
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


class Sampler:
    """Use it as a context manager; `add` a run before it starts."""

    def __init__(self) -> None:
        self._runs: dict[str, Seen] = {}
        self._others: dict[int, float] = {}  # pid without a token -> when to look again
        self._ours: dict[int, tuple[float, str, bool]] = {}  # pid -> (start, token, is a trainer)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.longest_s = 0.0
        self.error: BaseException | None = None

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def add(self, token: str, folder: Path) -> Seen:
        seen = self._runs[token] = Seen(folder)
        return seen

    def remove(self, token: str) -> None:
        self._runs.pop(token, None)

    def _sample(self) -> None:
        last_s = time.monotonic()
        while not self._over.wait(SAMPLE_S):
            now_s = time.monotonic()
            self.longest_s, last_s = max(self.longest_s, now_s - last_s), now_s
            living, monitors = self._living(now_s)
            locks = held_locks()
            for token, seen in list(self._runs.items()):
                seen.monitors = monitors.get(token, 0)
                seen.note(living.get(token, {}), locks, now_s)

    def _living(self, now_s: float) -> tuple[dict[str, dict[int, float]], dict[str, int]]:
        """token -> {pid: start} of the living trainers; token -> how many monitors live."""
        found: dict[str, dict[int, float]] = {}
        monitors: dict[str, int] = {}
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        for gone in self._ours.keys() - set(pids):
            del self._ours[gone]
        for pid in pids:
            if self._others.get(pid, 0.0) > now_s:
                continue
            start = _start(pid)
            known = self._ours.get(pid)
            if known is None or known[0] != start:
                token = variables_of(pid).get(TOKEN.encode())
                if start is None or token is None:
                    self._others[pid] = now_s + RESCAN_S
                    continue
                known = self._ours[pid] = (start, token.decode(), False)
            words = [] if known[2] else _command(pid)
            if _is_trainer(words) and not waits(pid):
                known = self._ours[pid] = (known[0], known[1], True)
            if known[2]:
                found.setdefault(known[1], {})[pid] = known[0]
            elif words[1:4] == [b"-m", b"monitor", b"run"]:
                monitors[known[1]] = monitors.get(known[1], 0) + 1
        return found, monitors


def _start(pid: int) -> float | None:
    """When the process was started, None when it is dead."""
    found = platform.process_info(pid)
    return None if found is None or found.dead else found.start


def _command(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def _is_trainer(words: list[bytes]) -> bool:
    return len(words) > 1 and b"python" in words[0] and words[1].endswith(b"/toy_loop.py")


def held_locks() -> set[int] | None:
    """Inodes of the files that a process holds a lock on; None where the kernel does not list them."""
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return {int(line.split("->")[0].split()[-3].rpartition(":")[2]) for line in lines if "->" not in line}
