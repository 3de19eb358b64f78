"""Measures snapshots in memory inside a training: `HANGPROOF_INJECT=benchmarks.snapshot_meter:fire`.

Decision: the loop is the trainer's own, and what it calls at a step boundary is measured. A measured step begins and ends where the
trainer asks whether a snapshot is due, so it holds one snapshot or none, and what the thread does meanwhile. Blocks of steps with
snapshots and without take turns in one process, so that other programs affect both equally.

    METER_RECORD   the file that gets one line of JSON for each measured step
    METER_BLOCK    steps of a block
"""

from __future__ import annotations

import atexit
import json
import os
import time
from pathlib import Path
from typing import Any

from guards.heartbeat import Heartbeat
from guards.snapshots import Snapshots

_due, _take = Snapshots.due, Snapshots.take
_meter: Meter | None = None


def fire(phase: str, step: int, heartbeat: Heartbeat) -> None:
    """Begin to measure when the training starts."""
    global _meter
    if _meter is None:
        _meter = Meter()


class Meter:
    """The measured step, and what it records."""

    def __init__(self) -> None:
        self.block = int(os.environ["METER_BLOCK"])
        self.file = open(os.environ["METER_RECORD"], "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
        atexit.register(self.file.close)
        self.row: dict[str, Any] = {}
        self.before: tuple[float, ...] = ()
        self.number = 0
        self.asked_s = 0.0
        Snapshots.due = lambda ours: self.due(ours)  # type: ignore[method-assign, assignment]
        Snapshots.take = lambda ours, *rest, **more: self.take(ours, *rest, **more)  # type: ignore[method-assign]

    def due(self, ours: Snapshots) -> bool:
        """A step boundary: the measured step ends, the next one begins."""
        number, self.number = self.number, self.number + 1
        block, starts = number // self.block, number % self.block == 0
        self.end(ours, starts)
        if starts:
            ours._last_s = None  # the pause between two blocks is no step
        self.row = {"block": block, "snapshots": block % 2 == 0, "taken": False}
        self.before = readings(ours)
        self.asked_s = time.perf_counter()
        due = block % 2 == 0 and _due(ours)
        self.row["clock_s"] = time.perf_counter() - self.asked_s
        return due

    def take(self, ours: Snapshots, *rest: Any, **more: Any) -> None:
        """A snapshot, which the training waits for until its tensors are copied."""
        _take(ours, *rest, **more)
        self.row |= {"clock_s": time.perf_counter() - self.asked_s, "taken": True}

    def end(self, ours: Snapshots, last: bool) -> None:
        """Write the line of the step that ends; of the first one nothing is known. last: of its block.

        What the thread would do in the steps after a block it does between the blocks (`rest_s`), faster than it would there.
        """
        after = readings(ours)
        if last:
            ours.wait()
        if self.before:
            spent = dict(zip(READINGS, (b - a for a, b in zip(self.before, after, strict=True)), strict=True))
            spent["rest_s"] = thread_s(ours) - after[-1]
            self.file.write(json.dumps(self.row | spent | {"every": ours.every, "off": ours.off}) + "\n")
            self.file.flush()


READINGS = ("wall_s", "stolen_s", "thread_s")


def readings(ours: Snapshots) -> tuple[float, ...]:
    """Seconds so far: of the clock, taken by the host, and of the snapshots' thread."""
    return time.perf_counter(), stolen_s(), thread_s(ours)


def stolen_s() -> float:
    """Seconds that the host of this virtual machine has kept from a processor on average (man 5 proc_stat)."""
    ticks = int(Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=9)[8])
    return ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


def thread_s(ours: Snapshots) -> float:
    """Seconds of processor time that their thread has used."""
    thread = ours._thread
    if thread is None or thread.ident is None:
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
