"""Measures snapshots in memory and saves inside a training: `HANGPROOF_INJECT=benchmarks.snapshot_meter:fire`.

Decision: the loop is the trainer's own, and what it calls at a step boundary is measured. A measured step begins and ends where the
trainer asks whether a snapshot is due, so it holds one snapshot or none, and what the thread does meanwhile. Blocks of steps with
snapshots and without take turns in one process, so that other programs affect both equally.

In every third block the work of snapshots is done several times, and may take so many times as much of a step. Other programs make
a step longer by more than a snapshot does; with so much work one sees by how much a second of it makes a step longer.

    METER_RECORD   the file that gets one line of JSON for each measured step, and for each save
    METER_BLOCK    steps of a block; 0: snapshots are as they are, and only saves are measured
"""

from __future__ import annotations

import atexit
import json
import os
import time
from pathlib import Path
from typing import Any

from guards import snapshot_record, snapshots, tensor_copies
from guards.heartbeat import Heartbeat
from guards.snapshots import Snapshots
from guards.state_saves import StateSaves

KINDS = (1, 0, 8)  # how often the blocks do the work of snapshots, in turn; 0: no snapshots

_due, _take, _save = Snapshots.due, Snapshots.take, StateSaves.save
_copy, _check, _share = tensor_copies.copy, snapshot_record.check, snapshots.SHARE
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
        self.asked: tuple[float, float] = (0.0, 0.0)
        StateSaves.save = lambda saves, name, step, *rest, **more: self.save(saves, name, step, *rest, **more)  # type: ignore[method-assign]
        if self.block:
            Snapshots.due = lambda ours: self.due(ours)  # type: ignore[method-assign, assignment]
            Snapshots.take = lambda ours, *rest, **more: self.take(ours, *rest, **more)  # type: ignore[method-assign]

    def due(self, ours: Snapshots) -> bool:
        """A step boundary: the measured step ends, the next one begins."""
        number, self.number = self.number, self.number + 1
        starts, times = number % self.block == 0, KINDS[number // self.block % len(KINDS)]
        self.end(ours, starts)
        if starts:
            ours._last_s = None  # the pause between two blocks is no step
            ours._costs.clear()  # the next kind of block has others
            work(max(1, times))
        self.row = {"block": number // self.block, "times": times, "taken": False}
        self.before = readings(ours)
        self.asked = time.thread_time(), time.perf_counter()
        due = bool(times) and _due(ours)
        self.row |= self.inside()
        return due

    def take(self, ours: Snapshots, *rest: Any, **more: Any) -> None:
        _take(ours, *rest, **more)
        self.row |= self.inside() | {"taken": True}

    def inside(self) -> dict[str, float]:
        """Seconds since the trainer has asked: processor time of this thread, which takes part in the copy to its end, and of the clock."""
        return {"inside_s": time.thread_time() - self.asked[0], "clock_s": time.perf_counter() - self.asked[1]}

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
            self.write(self.row | spent | {"every": ours.every, "off": ours.off})

    def save(self, saves: StateSaves, name: str, step: int, *rest: Any, **more: Any) -> None:
        began, began_cpu = time.perf_counter(), time.thread_time()
        _save(saves, name, step, *rest, **more)
        self.write({"save": step, "wall_s": time.perf_counter() - began, "cpu_s": time.thread_time() - began_cpu})

    def write(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()


def work(times: int) -> None:
    """From now on snapshots copy and check so many times, each time all of it, and may take so many times as much of the time."""

    def copies(*rest: Any) -> None:
        for _ in range(times):
            _copy(*rest)

    def checks(*rest: Any) -> tuple[bool, int]:
        return [_check(*rest) for _ in range(times)][-1]

    tensor_copies.copy = copies if times > 1 else _copy  # type: ignore[assignment]
    snapshot_record.check = checks if times > 1 else _check  # type: ignore[assignment]
    snapshots.SHARE = _share * times


READINGS = ("wall_s", "cpu_s", "stolen_s", "thread_s")


def readings(ours: Snapshots) -> tuple[float, ...]:
    """Seconds so far: of the clock, of this process on all cores, taken by the host, and of the snapshots' thread."""
    return time.perf_counter(), time.process_time(), stolen_s(), thread_s(ours)


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
