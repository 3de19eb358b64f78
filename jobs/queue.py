"""The queue: runs that wait for the machine's GPU, in an order that people change.

Decision: `outputs/.queue.json` holds the order; whoever changes it holds a file lock for that moment. Nothing waits for
the next run's turn: each monitor that ends, the page, each command of the queue and `resume-all` start a process
(worker.py) that starts what can start now, and ends. So a kill of any of them costs nothing.

An entry with a `problem` could not be started: it stays, and does not keep the others waiting. A sweep is one entry
with several runs, which are started one after another. monitor/gpu.py is below this: it keeps two runs off one GPU,
whoever starts them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from guards.checkpoint import atomic_write
from monitor.gpu import devices
from monitor.process import platform
from monitor.process.platform import LOCK, Lock, is_held
from monitor.run_folder import QUEUE as FILE
from monitor.run_folder import MonitorError, RunFolder, read_json, wake_queue

FILE_LOCK, WORKER_LOCK = ".queue.lock", ".queue-worker.lock"  # in outputs/
LOCK_S = 10.0  # for others that change the queue
MOST = 200  # entries
NO_GPU = "cpu"  # what runs without a GPU wait for: one of the queue at a time


@dataclass(frozen=True)
class Entry:
    """One place in the queue. `run`: the name of its folder; of a sweep, the sweep's name."""

    run: str
    added_at: str = ""
    sweep: tuple[str, ...] = ()  # the runs of a sweep that are not started yet
    total: int = 0  # runs of the sweep
    after_pause: bool = False  # it was paused for another run: it goes on only if it is still paused
    problem: str = ""  # why it could not be started

    @property
    def next_run(self) -> str:
        """The run that is started next."""
        return self.sweep[0] if self.sweep else self.run


@dataclass(frozen=True)
class Queue:
    """The content of the file. `taken`: the run that is being started, and when that began (Unix time)."""

    entries: tuple[Entry, ...] = ()
    taken: str = ""
    taken_s: float = 0.0


def outputs() -> Path:
    """The folder of the runs."""
    from runs.paths import outputs_dir

    return outputs_dir()


def read() -> Queue:
    """The queue as it is now; an empty one where the file is missing or damaged."""
    values = read_json(outputs() / FILE) or {}
    found: list[Entry] = []
    entries = values.get("entries")
    for one in entries if isinstance(entries, list) else ():
        entry = _entry(one)
        if entry is not None and entry.run not in {known.run for known in found}:
            found.append(entry)
    taken, taken_s = values.get("taken"), values.get("taken_s")
    known = isinstance(taken, str) and isinstance(taken_s, int | float)
    return Queue(tuple(found), str(taken) if known else "", float(taken_s) if known and taken_s else 0.0)


def _entry(values: object) -> Entry | None:
    """An entry of the file; None for one that is damaged or would leave the folder of runs."""
    if not isinstance(values, dict):
        return None
    values = {key: value for key, value in values.items() if key in Entry.__dataclass_fields__}
    values["sweep"] = tuple(values.get("sweep") or ())
    try:
        entry = Entry(**values)
    except TypeError:
        return None
    names = (entry.run, *entry.sweep)
    return entry if all(isinstance(name, str) and name and Path(name).name == name for name in names) else None


@contextlib.contextmanager
def changing() -> Iterator[list[Queue]]:
    """The queue, to be replaced in the list; written at the end, while no other process changes it.

    Raises:
        MonitorError: another process keeps it. OSError: it cannot be written.
    """
    lock = Lock(outputs() / FILE_LOCK)
    if not lock.acquire(patience_s=LOCK_S):
        raise MonitorError(
            f"{outputs() / FILE}: another process has been changing the queue for {LOCK_S:.0f} s; try again"
        )
    try:
        before = read()
        held = [before]
        yield held
        if held[0] != before:
            atomic_write(outputs() / FILE, json.dumps({"version": 1, **asdict(held[0])}, ensure_ascii=False, indent=1))
    finally:
        lock.release()


# ---- what people do ----


def add(folder: Path, first: bool = False) -> int:
    """Put a run at the end of the queue (or at its front); its position, from 1. A run that waits already keeps its place.

    Raises:
        MonitorError: it is under way, completed, or the queue is full. OSError: the queue cannot be written.
    """
    if is_held(folder / LOCK):
        raise MonitorError(f"{folder.name} is under way already")
    return _insert(Entry(folder.name, platform.now().utc), 0 if first else None)


def add_sweep(name: str, runs: list[str]) -> int:
    """Put the runs of a sweep into the queue as one entry; its position, from 1. Raises as `add`."""
    return _insert(Entry(name, platform.now().utc, tuple(runs), len(runs)), None)


def _insert(entry: Entry, at: int | None) -> int:
    with changing() as held:
        entries = list(held[0].entries)
        if entry.run not in [one.run for one in entries]:
            if len(entries) >= MOST:
                raise MonitorError(
                    f"the queue has {MOST} entries already; wait until some have been trained, or cancel some"
                )
            entries.insert(len(entries) if at is None else at, entry)
        held[0] = replace(held[0], entries=tuple(entries))
        return [one.run for one in entries].index(entry.run) + 1


def cancel(run: str) -> Entry:
    """Take a run, or all that is left of a sweep, out of the queue; the entry. Raises MonitorError: it does not wait."""
    with changing() as held:
        entry = find_entry(held[0], run)
        held[0] = replace(held[0], entries=tuple(one for one in held[0].entries if one is not entry))
        return entry


def move(run: str, to: int) -> int:
    """Move a run to position `to` (from 1; too large is the end), and try one again that could not be started; the position.

    Only this run moves: two people who move different runs at once both get what they asked for. Raises MonitorError.
    """
    with changing() as held:
        entry = find_entry(held[0], run)
        entries = [one for one in held[0].entries if one is not entry]
        at = max(0, min(to - 1, len(entries)))
        entries.insert(at, replace(entry, problem=""))
        held[0] = replace(held[0], entries=tuple(entries))
        return at + 1


def find_entry(queue: Queue, run: str) -> Entry:
    """The entry of a run or a sweep. Raises MonitorError: it does not wait."""
    for entry in queue.entries:
        if entry.run == run:
            return entry
    raise MonitorError(f"{run} is not in the queue")


def forget(run: str) -> None:
    """A run is deleted: a new run of its name does not inherit its place. Raises MonitorError, OSError."""
    if not any(run in (entry.run, *entry.sweep) for entry in read().entries):
        return
    with changing() as held:
        entries = [replace(entry, sweep=tuple(one for one in entry.sweep if one != run)) for entry in held[0].entries]
        kept = (
            new
            for old, new in zip(held[0].entries, entries, strict=True)
            if (new.sweep if old.sweep else old.run != run)
        )
        held[0] = replace(held[0], entries=tuple(kept))


# ---- what is free ----


def devices_of(folder: Path) -> list[str]:
    """What a run waits for: its GPUs, or NO_GPU."""
    return devices(RunFolder(folder).spec) or [NO_GPU]


def under_way() -> list[Path]:
    """The folders of the runs that a monitor watches now, wherever they were started."""
    found = []
    try:
        with os.scandir(outputs()) as entries:
            names = sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())
    except OSError:
        return []
    for name in names:
        folder = outputs() / name
        if is_held(folder / LOCK):
            found.append(folder)
    return found


def busy(folder: Path) -> list[str]:
    """The names of the runs under way that use a GPU of the run in `folder`; without a GPU, all of them."""
    wanted = set(devices_of(folder))
    return [other.name for other in under_way() if other != folder and wanted & set(devices_of(other))]


def blockers(folder: Path) -> list[Path]:
    """The runs under way that a run waits for: itself, or those that use its GPU."""
    return [folder] if is_held(folder / LOCK) else [outputs() / other for other in busy(folder)]


# ---- the process that starts the next one ----


def anyone_waits() -> bool:
    """Whether a run waits that can be started."""
    return any(not entry.problem for entry in read().entries)


def next_can_start() -> bool:
    """Whether the first run that waits waits for no other."""
    first = next((entry for entry in read().entries if not entry.problem), None)
    return first is not None and not blockers(outputs() / first.next_run)


def ensure_worker() -> bool:
    """Start the queue's process where a run can start and none works; whether one was started. Never raises."""
    return next_can_start() and not is_held(outputs() / WORKER_LOCK) and wake_queue(outputs())
