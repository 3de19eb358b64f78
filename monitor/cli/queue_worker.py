"""Starts the runs of the queue (run_queue.py), one after another, and its commands: `python -m monitor queue …`.

Decision: what is being started is noted in the queue's file before, with the time, and removed from it afterwards. Whoever
finds such a note after a kill sees by the run's own status whether it was started: it is then not started again, even if it
has ended already. A run that has started is left to its monitor, whatever becomes of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from monitor import run_queue
from monitor.cli import requests
from monitor.cli.commands import START_S, ask_to_end, launch
from monitor.gpu.queue import devices
from monitor.process import platform
from monitor.process.locks import LOCK, Lock, is_held
from monitor.resume.script import start_problems
from monitor.run_folder import STATUS, MonitorError, RunFolder, find
from monitor.run_queue import Entry, Queue, busy, changing, ensure_worker, find_entry, outputs
from monitor.state import State, nothing_left, read_status

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
    if waits and (any(not entry.problem for entry in run_queue.read().entries) or busy(folder)):
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
    position = run_queue.add(folder)
    ensure_worker()
    return position


def run_now(run: str) -> list[str]:
    """Start a run of the queue before all others: what trains on its GPU is paused, and goes on after it.

    Returns the names of the runs that were asked to pause. Raises MonitorError, OSError.
    """
    first = find_entry(run_queue.read(), run)
    paused = [outputs() / name for name in busy(outputs() / first.next_run)]
    with changing() as held:
        entry = find_entry(held[0], run)
        names = {entry.run, *(other.name for other in paused)}
        later = [Entry(other.name, platform.now().utc, after_pause=True) for other in paused]
        rest = [one for one in held[0].entries if one.run not in names]
        held[0] = replace(held[0], entries=(replace(entry, problem=""), *later, *rest))
    for other in paused:
        with contextlib.suppress(MonitorError):  # it has ended meanwhile
            requests.pause(other)
    ensure_worker()
    return [other.name for other in paused]


def cancel(run: str) -> list[str]:
    """Remove a run from the queue; of a sweep, all that is left, and stop the run of it that trains. The runs that are stopped.

    Raises:
        MonitorError: it neither waits nor trains. OSError: the queue cannot be written.
    """
    from runs import sweep

    entry, found = None, next((one for one in sweep.all_sweeps() if one.name == run), None)
    with contextlib.suppress(MonitorError) if found else contextlib.nullcontext():
        entry = run_queue.cancel(run)
    training = [name for name, _ in found.runs if is_held(outputs() / name / LOCK)] if found else []
    if entry is None and not training:
        raise MonitorError(f"{run}: none of its runs waits or trains")
    for name in training:
        with contextlib.suppress(MonitorError):  # it has ended meanwhile
            ask_to_end(outputs() / name, {"now": False})
    return training


# ---- starting the next one ----


def advance() -> list[Path]:
    """Start what can start now, in order; the runs that the first one waits for, [] when nothing waits.

    Raises MonitorError: another process keeps the queue. OSError: it cannot be written.
    """
    while True:
        name, blockers = _take()
        if name is None:
            return blockers
        problem = _start(outputs() / name)
        with changing() as held:
            entries = [_started(entry, name, problem) for entry in held[0].entries]
            held[0] = Queue(tuple(entry for entry in entries if entry is not None))


def _take() -> tuple[str | None, list[Path]]:
    """The next run that can start, noted in the file as taken; or None, and the runs that it waits for."""
    with changing() as held:
        queue = held[0]
        entries = [entry for one in queue.entries if (entry := _current(one, queue)) is not None]
        first = next((one for one in entries if not one.problem), None)
        name, blockers = None, list[Path]()
        if first is not None:
            folder = outputs() / first.next_run
            blockers = [folder] if is_held(folder / LOCK) else [outputs() / other for other in busy(folder)]
            name = None if blockers else first.next_run
        held[0] = Queue(tuple(entries), name or "", time.time() if name else 0.0)
        return name, blockers


def _current(entry: Entry, queue: Queue) -> Entry | None:
    """The entry without what was deleted, or started by somebody else or before a kill; None when nothing is left."""
    if entry.sweep:
        left = tuple(name for name in entry.sweep if _waits(outputs() / name, queue))
        return replace(entry, sweep=left) if left else None
    folder = outputs() / entry.run
    if entry.after_pause:
        status = read_status(folder)
        paused = status is not None and (status["alive"] or status["state"] == State.PAUSED)
        return entry if paused and not _was_started(folder, queue) else None
    return entry if _waits(folder, queue) else None


def _waits(folder: Path, queue: Queue) -> bool:
    return folder.is_dir() and not is_held(folder / LOCK) and not _was_started(folder, queue)


def _was_started(folder: Path, queue: Queue) -> bool:
    """Whether the run that a killed process had taken got its monitor, which writes its status first."""
    with contextlib.suppress(OSError):
        return folder.name == queue.taken and (folder / STATUS).stat().st_mtime >= queue.taken_s
    return False


def _start(folder: Path) -> str:
    """Start the run of an entry; "" or why that is impossible. One with nothing left to train counts as started."""
    from runs import sweep

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
    """Start runs until none waits; at once 0 where another process does it."""
    lock = Lock(outputs() / run_queue.WORKER_LOCK)
    while _someone_waits() and lock.acquire():
        try:
            _work(lock)
        finally:
            lock.release()
        # A run that was added between the last look and the release of the lock found it held: look once more.
    return 0


def _someone_waits() -> bool:
    return any(not entry.problem for entry in run_queue.read().entries)


def _work(lock: Lock) -> None:
    """Start what can start; look again when the queue has changed or one of the runs that are waited for has ended.

    lock: its file says when this process looked last, for `run_queue.ensure_worker`.
    """
    while _someone_waits():
        lock.write(run_queue.worker_mark())
        stamp, blockers = _stamp(), list[Path]()
        try:
            blockers = advance()
            stamp = _stamp()
        except Exception:  # noqa: BLE001 - the top of the loop: logged, and tried again
            _log(traceback.format_exc())
            time.sleep(POLL_S)
        while blockers and stamp == _stamp() and all(is_held(folder / LOCK) for folder in blockers):
            lock.write(run_queue.worker_mark())
            time.sleep(POLL_S)


def _stamp() -> int:
    with contextlib.suppress(OSError):
        return (outputs() / run_queue.FILE).stat().st_mtime_ns
    return 0


def _log(text: str) -> None:
    path = outputs() / LOG
    with contextlib.suppress(OSError):
        mode = "w" if path.exists() and path.stat().st_size > LOG_BYTES else "a"
        with open(path, mode, encoding="utf-8", errors="replace") as file:
            file.write(f"{platform.now().utc} {text}\n")


# ---- the commands ----


def run(args: argparse.Namespace) -> int:
    """`monitor queue [list|add|start|move|cancel|now|work] [RUN] [POSITION]`. Raises MonitorError, OSError."""
    if args.action == "work":
        return work()
    if args.action != "list" and not args.run:
        raise MonitorError(f"name the run: python -m monitor queue {args.action} RUN")
    if args.action == "add":
        name = find(args.run).name
        print(f"{name}: position {add(find(args.run))} in the queue")
    elif args.action == "start":
        name, answer = find(args.run).name, start_or_wait(find(args.run))
        waits = f"position {answer['position']} in the queue" if answer["position"] else ""
        watched = f"watched by process {answer['pid']}" if answer["pid"] else ""
        print(f"{name}: {waits or watched or nothing_left(find(args.run))}")
    elif args.action == "move":
        if args.position is None:
            raise MonitorError(f"name the position, from 1: python -m monitor queue move {args.run} 1")
        print(f"{args.run}: position {run_queue.move(_name(args.run), args.position)} in the queue")
        ensure_worker()
    elif args.action == "cancel":
        stopped = cancel(_name(args.run))
        print(f"{args.run}: removed from the queue" + (f"; stopping {', '.join(stopped)}" if stopped else ""))
    elif args.action == "now":
        paused = run_now(_name(args.run))
        print(f"{args.run}: starts next" + (f"; paused for it: {', '.join(paused)}" if paused else ""))
    queue = run_queue.read()
    if args.action == "list":
        for number, entry in enumerate(queue.entries, 1):
            left = f", {entry.total - len(entry.sweep)} of {entry.total} started" if entry.sweep else ""
            print(f"{number}. {entry.run}{left}" + (f": {entry.problem}" if entry.problem else ""))
        if not queue.entries:
            print("no run waits")
    if args.json:
        print(json.dumps([asdict(entry) for entry in queue.entries], ensure_ascii=False))
    return 0


def _name(word: str) -> str:
    """The name that an entry has: the word itself, or the folder of the run that it names."""
    if any(entry.run == word for entry in run_queue.read().entries):
        return word
    try:
        return find(word).name
    except MonitorError:
        return os.path.basename(word)
