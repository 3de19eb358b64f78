"""The queue: runs that wait for the machine's GPU, in an order that people change.

Decision: `outputs/.queue.json` holds the order; whoever changes it holds a file lock for that moment. Nothing waits for
the next run's turn: each monitor that ends, the page, each command of the queue and `resume-all` start a process
(`work`) that starts what can start now, and ends. So a kill of any of them costs nothing.

What is being started is noted in the file before, with the time of its status, and removed from it afterwards. Whoever
finds such a note after a kill sees whether that status was written since (no clock is compared with a network drive's):
the run is then not started again, even if it has ended already. One that has started is left to its monitor.

An entry with a `problem` could not be started: it stays, and does not keep the others waiting. A sweep is one entry
with several runs, which are started one after another. monitor/gpu.py is below this: it keeps two runs off one GPU,
whoever starts them.
"""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from guards import shell
from guards.checkpoint import atomic_write
from guards.reading import json_object, read_bytes
from monitor.cli.commands import ask_to_end, launch, refuse_unready
from monitor.gpu import devices
from monitor.process import platform
from monitor.process.platform import LOCK, Lock, is_held
from monitor.process.spawned import unwatched
from monitor.run_folder import QUEUE as FILE, STATUS, MonitorError, RunFolder, read_json, wake_queue
from monitor.state import FINAL, State, is_abandoned, nothing_left, read_status
from runs import sweep
from runs.files import typed
from runs.paths import outputs_dir as outputs

# In outputs/. An earlier version's process, which an update leaves unable to start a run, holds `.queue-worker.lock`.
FILE_LOCK, WORKER_LOCK = ".queue.lock", ".queue-start.lock"
LOG, LOG_BYTES = ".queue.log", 1 << 20  # in outputs/: errors of the process
LOCK_S = 10.0  # for others that change the queue
POLL_S = 1.0  # after an error
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


@dataclass
class Queue:
    """The content of the file. `taken`: the run that is being started; `status_ns`: `_status_ns` before that."""

    entries: list[Entry] = field(default_factory=list)
    taken: str = ""
    status_ns: int = 0


def read() -> Queue:
    """The queue as it is now; an empty one where the file is missing, damaged or cannot be read."""
    return _queue(read_json(outputs() / FILE) or {})


def _queue(values: dict[str, Any]) -> Queue:
    found: list[Entry] = []
    entries = values.get("entries")
    for one in entries if isinstance(entries, list) else ():
        entry = _entry(one)
        if entry is not None and entry.run not in {known.run for known in found}:
            found.append(entry)
    taken, status_ns = values.get("taken"), values.get("status_ns")
    return Queue(found, taken, status_ns) if isinstance(taken, str) and isinstance(status_ns, int) else Queue(found)


def _entry(values: object) -> Entry | None:
    """An entry of the file; None for one that is damaged or would leave the folder of runs."""
    try:
        entry: Entry = typed(Entry, values)
    except (TypeError, ValueError):
        return None
    plain = all(Path(name).name == name not in ("", "..") for name in (entry.run, *entry.sweep))
    return entry if plain else None


@contextlib.contextmanager
def changing() -> Iterator[Queue]:
    """The queue, to be changed; written at the end, while no other process changes it.

    Raises:
        MonitorError: another process keeps it. OSError: it cannot be read now, or not written.
    """
    lock = Lock(outputs() / FILE_LOCK)
    if not lock.acquire(patience_s=LOCK_S):
        raise MonitorError(
            f"{outputs() / FILE}: another process has been changing the queue for {LOCK_S:.0f} s; try again"
        )
    try:
        try:
            queue = _queue(json_object(read_bytes(outputs() / FILE)) or {})
        except FileNotFoundError:
            queue = Queue()
        before = asdict(queue)
        yield queue
        if (after := asdict(queue)) != before:
            atomic_write(outputs() / FILE, json.dumps({"version": 1, **after}, ensure_ascii=False, indent=1))
    finally:
        lock.release()


# ---- what people do ----


def start_or_wait(folder: Path) -> dict[str, Any]:
    """Start a run now, or put it into the queue where its GPU is busy or others wait: {"position", "pid"}, one of them None.

    Without a GPU there is nothing to wait for, and it starts, as does one that is no run of the queue's: its monitor waits
    for the GPU. A run that is complete does not. Raises MonitorError, OSError.
    """
    if not is_held(folder / LOCK) and nothing_left(folder):
        return {"position": None, "pid": None}
    waits = _is_here(folder) and devices(RunFolder(folder).spec) and not is_held(folder / LOCK)
    if waits and (first_waiting() or busy(folder)):
        try:
            return {"position": add(folder), "pid": None}
        except MonitorError:
            if not is_held(folder / LOCK):  # else it was started meanwhile
                raise
    return {"position": None, "pid": launch(folder)["pid"]}


def add(folder: Path) -> int:
    """Put a run at the end of the queue, which is then worked off; its position, from 1.

    Raises MonitorError: it could not be started, is under way, or is complete. OSError: the queue cannot be written.
    """
    if done := nothing_left(folder):
        raise MonitorError(f"{folder.name} is {done}")
    refuse_unready(RunFolder(folder))
    position = insert(folder)
    ensure_worker()
    return position


def insert(folder: Path) -> int:
    """Put a run at the end of the queue; its position, from 1. A run that waits already keeps its place.

    Raises:
        MonitorError: it is under way or elsewhere, or the queue is full. OSError: the queue cannot be written.
    """
    if is_held(folder / LOCK):
        raise MonitorError(f"{folder.name} is under way already")
    if not _is_here(folder):
        how = f"start it with `python -m monitor start {shell.word(folder)}`: it waits for a free GPU"
        raise MonitorError(f"the queue holds the runs of {outputs()}, and {folder} is not one of them; {how}")
    return _insert(Entry(folder.name, platform.now().utc))


def _is_here(folder: Path) -> bool:
    """Whether the queue finds it by its name."""
    return (outputs() / folder.name).resolve() == folder.resolve()


def add_sweep(made: sweep.Sweep) -> int:
    """Put the runs of a sweep into the queue as one entry; its position, from 1.

    Raises MonitorError: they are not in the queue, and how to add them.
    """
    names = tuple(run for run, _ in made.runs)
    try:
        return _insert(Entry(made.name, platform.now().utc, names, len(names)))
    except (MonitorError, OSError) as error:
        how = f"Add each on its page, or with `python -m jobs queue add RUN`: {', '.join(names)}"
        raise MonitorError(f"{len(names)} runs are made, but not in the queue: {error}. {how}") from error


def _insert(entry: Entry) -> int:
    with changing() as queue:
        names = [one.run for one in queue.entries]
        if entry.run in names:  # it is tried again, whatever prevented its start before
            at = names.index(entry.run)
            queue.entries[at] = replace(queue.entries[at], problem="", after_pause=False)
            return at + 1
        if len(names) >= MOST:
            raise MonitorError(
                f"the queue has {MOST} entries already; wait until some have been trained, or cancel some"
            )
        queue.entries.append(entry)
        return len(queue.entries)


def run_now(run: str) -> list[str]:
    """Start a run of the queue before all others: what trains on its GPU is paused, and goes on after it.

    Returns the names of the runs that were asked to pause. Raises MonitorError, OSError.
    """
    first = find_entry(read(), run)
    paused = [outputs() / name for name in busy(outputs() / first.next_run)]
    with changing() as queue:
        entry = find_entry(queue, run)
        names = {entry.run, *(other.name for other in paused)}
        later = [Entry(other.name, platform.now().utc, after_pause=True) for other in paused]
        rest = [one for one in queue.entries if one.run not in names]
        queue.entries = [replace(entry, problem=""), *later, *rest]
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
        entry = remove(run)
    training = [name for name, _ in found.runs if is_held(outputs() / name / LOCK)] if found else []
    if entry is None and not training:
        raise MonitorError(f"{run}: none of its runs waits or trains")
    for name in training:
        with contextlib.suppress(MonitorError):  # it has ended meanwhile
            ask_to_end(outputs() / name, {"now": False})
    return training


def remove(run: str) -> Entry:
    """Take a run, or all that is left of a sweep, out of the queue; the entry. Raises MonitorError: it does not wait."""
    with changing() as queue:
        entry = find_entry(queue, run)
        queue.entries.remove(entry)
        return entry


def move(run: str, to: int) -> int:
    """Move a run to position `to` (from 1; too large is the end), and try one again that could not be started; the position.

    Only this run moves: two people who move different runs at once both get what they asked for. Raises MonitorError.
    """
    with changing() as queue:
        entry = find_entry(queue, run)
        queue.entries.remove(entry)
        at = max(0, min(to - 1, len(queue.entries)))
        queue.entries.insert(at, replace(entry, problem=""))
        return at + 1


def find_entry(queue: Queue, run: str) -> Entry:
    """The entry of a run or a sweep. Raises MonitorError: it does not wait."""
    for entry in queue.entries:
        if entry.run == run:
            return entry
    raise MonitorError(f"{run} is not in the queue")


def forget(run: str) -> None:
    """A run is deleted: a new run of its name does not inherit its place. If that fails, it is not started anyway."""
    if not any(run in (entry.run, *entry.sweep) for entry in read().entries):
        return
    with contextlib.suppress(MonitorError, OSError), changing() as queue:
        queue.entries = [left for entry in queue.entries if (left := _without(entry, run))]


# ---- what is free ----


def devices_of(folder: Path) -> list[str]:
    """What a run waits for: its GPUs, or NO_GPU. One under way may have been started with other variables: its monitor knows."""
    known = (read_json(folder / STATUS) or {}).get("devices") if is_held(folder / LOCK) else None
    return (known if isinstance(known, list) else devices(RunFolder(folder).spec)) or [NO_GPU]


def under_way() -> list[Path]:
    """The folders of the runs that a monitor watches now, wherever they were started."""
    return [lock.parent for lock in sorted(outputs().glob(f"*/{LOCK}")) if is_held(lock)]


def busy(folder: Path) -> list[str]:
    """The names of the runs under way that use a GPU of the run in `folder`; without a GPU, all of them."""
    wanted = set(devices_of(folder))
    return [other.name for other in under_way() if other != folder and wanted & set(devices_of(other))]


def blockers(folder: Path) -> list[Path]:
    """The runs under way that a run waits for: itself, or those that use its GPU."""
    return [folder] if is_held(folder / LOCK) else [outputs() / other for other in busy(folder)]


def first_waiting() -> Entry | None:
    """The first entry that can be started."""
    return next((entry for entry in read().entries if not entry.problem), None)


def next_can_start() -> bool:
    """Whether the first run that waits waits for no other."""
    first = first_waiting()
    return first is not None and not blockers(outputs() / first.next_run)


def ensure_worker() -> bool:
    """Start the queue's process where a run can start and none works; whether one was started. Never raises."""
    return next_can_start() and not is_held(outputs() / WORKER_LOCK) and wake_queue(outputs())


# ---- starting the next one ----


def advance() -> None:
    """Start what can start now, in order.

    Raises MonitorError: another process keeps the queue. OSError: it cannot be written.
    """
    _adopt()
    while name := _take():
        problem = _start(outputs() / name)
        with changing() as queue:
            waits = any(name in (entry.run, *entry.sweep) for entry in queue.entries)
            queue.entries = [left for entry in queue.entries if (left := _without(entry, name, problem))]
            queue.taken, queue.status_ns = "", 0
        if not (waits or problem):
            with contextlib.suppress(MonitorError):  # cancelled while it was being started
                ask_to_end(outputs() / name, {"now": False})


def _adopt() -> None:
    """Start a monitor for each training that has lost its own, with the keeper: it has the GPU, and nobody else ends its
    hang. A run in a final state is not continued, whatever its script has left behind."""
    for folder in {folder for _, folder in unwatched()}:
        status = read_status(folder) if _is_here(folder) else None
        kept = status is not None and platform.process_info(status.get("keeper_pid") or 0) is not None
        if status is not None and status["state"] not in FINAL and not kept:
            with contextlib.suppress(MonitorError, OSError):  # the others do not wait for it
                launch(folder, "resume")


def _take() -> str:
    """The next run that can start, noted in the file as taken; "" for none."""
    with changing() as queue:
        entries = [entry for one in queue.entries if (entry := _current(one, queue)) is not None]
        first = next((one.next_run for one in entries if not one.problem), "")
        name = "" if first and blockers(outputs() / first) else first
        if name:
            queue.taken, queue.status_ns = name, _status_ns(outputs() / name)
        elif queue.taken not in [one.next_run for one in entries]:  # else its monitor may still write its status
            queue.taken, queue.status_ns = "", 0
        queue.entries = entries
        return name


def _current(entry: Entry, now: Queue) -> Entry | None:
    """The entry without what was deleted, or started by somebody else or before a kill; None when nothing is left."""
    if entry.sweep:
        left = tuple(name for name in entry.sweep if _waits(outputs() / name, now))
        return replace(entry, sweep=left) if left else None
    folder = outputs() / entry.run
    if entry.after_pause:
        status = read_status(folder)
        waits = status is not None and (status["alive"] or status["state"] == State.PAUSED or is_abandoned(status))
        return entry if waits and not _was_started(folder, now) else None
    return entry if _waits(folder, now) else None


def _waits(folder: Path, now: Queue) -> bool:
    return folder.is_dir() and not is_held(folder / LOCK) and not _was_started(folder, now)


def _was_started(folder: Path, now: Queue) -> bool:
    """Whether the run that a killed process had taken got its monitor, which writes its status first."""
    return folder.name == now.taken and _status_ns(folder) not in (0, now.status_ns)


def _status_ns(folder: Path) -> int:
    """When the run's status was written, by the clock of its disk; 0 for never."""
    with contextlib.suppress(OSError):
        return (folder / STATUS).stat().st_mtime_ns
    return 0


def _start(folder: Path) -> str:
    """Start the run of an entry; "" or why that is impossible. One with nothing left to train counts as started."""
    if not folder.is_dir() or nothing_left(folder):
        return ""
    try:
        sweep.share_caches(folder.name)
        launch(folder)
    except (MonitorError, OSError) as error:
        RunFolder(folder).log(f"the queue could not start this run: {error}")
        return str(error).splitlines()[0][:300]
    return ""


def _without(entry: Entry, name: str, problem: str = "") -> Entry | None:
    """What is left of an entry without its run `name`, which was started or deleted, or could not be started (`problem`)."""
    if name not in (entry.run, *entry.sweep):
        return entry
    if problem:
        return replace(entry, problem=problem)
    left = tuple(one for one in entry.sweep if one != name)
    return replace(entry, sweep=left) if left else None


# ---- the process ----


def work() -> int:
    """Start what can start now; at once 0 where another process does it."""
    lock = Lock(outputs() / WORKER_LOCK)
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
