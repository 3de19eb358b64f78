"""Starts the runs of the queue (queue.py), one after another, and what a button or a command of the queue does.

Decision: what is being started is noted in the queue's file before, with the time, and removed from it afterwards.
Whoever finds such a note after a kill sees by the run's own status whether it was started: it is then not started
again, even if it has ended already. A run that has started is left to its monitor, whatever becomes of it.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs import queue
from jobs.queue import (
    Entry,
    Queue,
    anyone_waits,
    blockers,
    busy,
    changing,
    ensure_worker,
    find_entry,
    next_can_start,
    outputs,
)
from monitor.cli.commands import START_S, ask_to_end, launch
from monitor.gpu import devices
from monitor.process import platform
from monitor.process.platform import LOCK, Lock, is_held
from monitor.resume.next_attempt import start_problems
from monitor.run_folder import STATUS, MonitorError, RunFolder
from monitor.state import State, nothing_left, read_status
from runs import sweep

POLL_S = 1.0
LOG = ".queue.log"  # in outputs/: errors of the process
LOG_BYTES = 1 << 20


def start_or_wait(folder: Path) -> dict[str, Any]:
    """Start a run now, or put it into the queue where its GPU is busy or others wait: {"position", "pid"}, one of them None.

    Without a GPU there is nothing to wait for, and it starts; a run that is complete does not. Raises MonitorError, OSError.
    """
    if not is_held(folder / LOCK) and nothing_left(folder):
        return {"position": None, "pid": None}
    waits = devices(RunFolder(folder).spec) and not is_held(folder / LOCK)
    if waits and (anyone_waits() or busy(folder)):
        return {"position": add(folder), "pid": None}
    return {"position": None, "pid": launch(folder)["pid"]}


def add(folder: Path) -> int:
    """Put a run at the end of the queue, which is then worked off; its position, from 1.

    Raises MonitorError: it could not be started, is under way, or is complete. OSError: the queue cannot be written.
    """
    if done := nothing_left(folder):
        raise MonitorError(f"{folder.name} is {done}")
    if missing := start_problems(RunFolder(folder), START_S, time.sleep):
        raise MonitorError(f"{folder.name} cannot be started: {'; '.join(missing)}")
    position = queue.add(folder)
    ensure_worker()
    return position


def run_now(run: str) -> list[str]:
    """Start a run of the queue before all others: what trains on its GPU is paused, and goes on after it.

    Returns the names of the runs that were asked to pause. Raises MonitorError, OSError.
    """
    first = find_entry(queue.read(), run)
    paused = [outputs() / name for name in busy(outputs() / first.next_run)]
    with changing() as held:
        entry = find_entry(held[0], run)
        names = {entry.run, *(other.name for other in paused)}
        later = [Entry(other.name, platform.now().utc, after_pause=True) for other in paused]
        rest = [one for one in held[0].entries if one.run not in names]
        held[0] = replace(held[0], entries=(replace(entry, problem=""), *later, *rest))
    for other in paused:
        with contextlib.suppress(MonitorError):  # it has ended meanwhile
            ask_to_end(other, {"pause": True})
    ensure_worker()
    return [other.name for other in paused]


def cancel(run: str) -> list[str]:
    """Remove a run from the queue; of a sweep, all that is left, and stop the run of it that trains. The runs that are stopped.

    Raises:
        MonitorError: it neither waits nor trains. OSError: the queue cannot be written.
    """
    entry, found = None, next((one for one in sweep.all_sweeps() if one.name == run), None)
    with contextlib.suppress(MonitorError) if found else contextlib.nullcontext():
        entry = queue.cancel(run)
    training = [name for name, _ in found.runs if is_held(outputs() / name / LOCK)] if found else []
    if entry is None and not training:
        raise MonitorError(f"{run}: none of its runs waits or trains")
    for name in training:
        with contextlib.suppress(MonitorError):  # it has ended meanwhile
            ask_to_end(outputs() / name, {"now": False})
    return training


# ---- starting the next one ----


def advance() -> None:
    """Start what can start now, in order.

    Raises MonitorError: another process keeps the queue. OSError: it cannot be written.
    """
    while name := _take():
        problem = _start(outputs() / name)
        with changing() as held:
            entries = [_started(entry, name, problem) for entry in held[0].entries]
            held[0] = Queue(tuple(entry for entry in entries if entry is not None))


def _take() -> str:
    """The next run that can start, noted in the file as taken; "" for none."""
    with changing() as held:
        now = held[0]
        entries = [entry for one in now.entries if (entry := _current(one, now)) is not None]
        first = next((one.next_run for one in entries if not one.problem), "")
        name = "" if first and blockers(outputs() / first) else first
        if name:
            held[0] = Queue(tuple(entries), name, time.time())
        elif any(now.taken == one.next_run for one in entries):
            # Its monitor may not have written its status yet, so the note stays.
            held[0] = replace(now, entries=tuple(entries))
        else:
            held[0] = Queue(tuple(entries))
        return name


def _current(entry: Entry, now: Queue) -> Entry | None:
    """The entry without what was deleted, or started by somebody else or before a kill; None when nothing is left."""
    if entry.sweep:
        left = tuple(name for name in entry.sweep if _waits(outputs() / name, now))
        return replace(entry, sweep=left) if left else None
    folder = outputs() / entry.run
    if entry.after_pause:
        status = read_status(folder)
        paused = status is not None and (status["alive"] or status["state"] == State.PAUSED)
        return entry if paused and not _was_started(folder, now) else None
    return entry if _waits(folder, now) else None


def _waits(folder: Path, now: Queue) -> bool:
    return folder.is_dir() and not is_held(folder / LOCK) and not _was_started(folder, now)


def _was_started(folder: Path, now: Queue) -> bool:
    """Whether the run that a killed process had taken got its monitor, which writes its status first."""
    with contextlib.suppress(OSError):
        return folder.name == now.taken and (folder / STATUS).stat().st_mtime >= now.taken_s
    return False


def _start(folder: Path) -> str:
    """Start the run of an entry; "" or why that is impossible. One with nothing left to train counts as started."""
    if not folder.is_dir() or nothing_left(folder):
        return ""
    try:
        sweep.share_caches(folder.name)
        launch(folder)
    except (MonitorError, OSError) as error:
        text = str(error).splitlines()[0][:300]
        RunFolder(folder).log(f"the queue could not start this run: {error}")
        return text
    return ""


def _started(entry: Entry, name: str, problem: str) -> Entry | None:
    """What is left of an entry after its run `name` was started, or could not be. A sweep goes on with its next run."""
    if name not in (entry.run, *entry.sweep):
        return entry
    if problem:
        return replace(entry, problem=problem)
    left = tuple(one for one in entry.sweep if one != name)
    return replace(entry, sweep=left) if left else None


# ---- the process ----


def work() -> int:
    """Start what can start now; at once 0 where another process does it."""
    lock = Lock(outputs() / queue.WORKER_LOCK)
    # A run that was added between the last look and the release of the lock found it held: look once more.
    while next_can_start() and lock.acquire():
        try:
            advance()
        except Exception:  # noqa: BLE001 - the top of the loop: logged, and tried again
            _log(traceback.format_exc())
            time.sleep(POLL_S)
        finally:
            lock.release()
    return 0


def _log(text: str) -> None:
    path = outputs() / LOG
    with contextlib.suppress(OSError):
        mode = "w" if path.exists() and path.stat().st_size > LOG_BYTES else "a"
        with open(path, mode, encoding="utf-8", errors="replace") as file:
            file.write(f"{platform.now().utc} {text}\n")
