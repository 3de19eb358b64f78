"""A limit on the time between two beats, for waits that no single guard covers.

A deadline surrounds each wait that is known. What stands between them (an import on a dead mount, a driver that does
not answer, a lock in a library) shows only as a heartbeat that stops. The monitor sees that, too; this limit ends the
process where no monitor runs, and before the monitor where one does. A process that still reads from a disk in a phase
that reads (loading 24 GB from a slow one sends no beat) gets more time.
"""

from __future__ import annotations

import threading
import time

from guards import deadline, limits
from guards.heartbeat import PHASES, Heartbeat
from guards.reading import moved_bytes

READS = ("import", "load", "hash")
"""Phases that are silent while they read large files."""
LEAST_READ_BYTES = 1 << 20
"""Bytes read between two looks that count as progress."""


def name_of(phase: str) -> str:
    """The limit of a phase in limits.TABLE."""
    return f"phase_{phase}_s"


def watch(heartbeat: Heartbeat, interval_s: float = 5.0) -> threading.Thread:
    """Start the thread that ends this process when the time since the last beat exceeds the limit of its phase."""
    thread = threading.Thread(target=_run, args=(heartbeat, interval_s), name="hangproof-phase-limit", daemon=True)
    thread.start()
    return thread


def _run(heartbeat: Heartbeat, interval_s: float) -> None:
    table = {phase: limits.seconds(name_of(phase)) for phase in PHASES}
    read, progress_s = _bytes_read(), time.monotonic()
    while True:
        before_s = time.monotonic()
        time.sleep(interval_s)
        now_s = time.monotonic()
        if now_s - before_s > 2 * interval_s:  # this process was stopped, or the machine slept: nothing could progress
            progress_s = now_s
        phase, limit_s = heartbeat.current_phase, table[heartbeat.current_phase]
        new = _bytes_read()
        if phase in READS and new - read > LEAST_READ_BYTES:
            progress_s = now_s
        read = new
        silent_s = now_s - max(progress_s, heartbeat.record.beat_s)
        if limit_s and silent_s > limit_s:
            deadline.expire(limit_s, f"any progress in phase {phase}")


def _bytes_read() -> int:
    """Bytes that this process has read; 0 where the system does not tell."""
    return moved_bytes("self", ("rchar",)) or 0
