"""Saves without a pause: the training copies what a save needs into shared memory, and a thread writes it to the disk.

Decision: one thread does the saves in the order in which the training asked for them (LoRA, old LoRAs, state, old
states), each exactly as without the thread. So at any moment, and after any kill, the disk holds what it would hold
then. The copy is a snapshot of its own beside those of snapshots.py, which are replaced long before a slow disk has
one. A process that is killed meanwhile leaves it, and the next one, which goes on from a later step, writes it
(`redo`): no save is lost.

This is done where snapshots in memory are on and the copy fits; elsewhere the training writes the state itself, and
waits. Saves of one step are under way at a time: the next step that saves waits for them, which a message says once. A
save that fails raises its error in the training, at the next boundary. Whoever ends the training waits first: `with
saves: train()`.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from guards import checkpoint, limits, snapshot_files
from guards.deadline import Deadline
from guards.heartbeat import Heartbeat
from guards.reading import moved_bytes
from guards.snapshot_files import File, SnapshotError
from guards.snapshots import THREAD_NICE, Snapshots
from guards.step_requests import append_event

EVENT = "slow_save"  # the kind of its line in events.jsonl
BEAT_POLL_S = 1.0  # between two beats while the training waits
SLOW_AGE_S = 2.0  # a shorter wait says nothing about the disk: the training may have been stopped right after a save
THREAD = "hangproof-saves"  # the name of the thread
NAME = "save-"  # begins the names of the copies


class StateSaves(contextlib.AbstractContextManager["StateSaves"]):
    """The saves of one training process. `snapshots`: those of the same training."""

    def __init__(self, snapshots: Snapshots, beat: Heartbeat) -> None:
        self.snapshots = snapshots
        self.beat = beat
        self._step = -1  # whose saves are under way
        self._what = ""  # the file or folder being written
        self._messages: set[str] = set()
        self._jobs: queue.Queue[tuple[str, Callable[[], object]]] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._written: list[Path] = []  # copies that are on the disk
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is under way or waits."""
        return self._jobs.unfinished_tasks > 0

    def begin(self, step: int) -> None:
        """The saves that follow are of `step`: wait for earlier ones. Raises the error of a save that failed."""
        if self.busy and step != self._step:
            what, of = self._what, self._step
            if not self._wait(SLOW_AGE_S):
                self._report_once(
                    "slow",
                    f"{what}, of step {of}, is still being written when step {step} saves: the disk is slower than the "
                    "training, which waits for it; save less often, or use a faster disk",
                )
                self._wait()
        self._step = step
        self.check()

    def save(
        self,
        name: str,
        step: int,
        epoch: int,
        files: list[File],
        write: Callable[[list[File]], object],
        belongs: dict[str, Any] | None = None,
    ) -> None:
        """Call `write` with the files as they are now: in the thread with a copy, at once where none has room.

        name: of the file or folder that it writes, which `redo` gets with step, epoch and belongs. A path that `write`
        returns, if it is a state's, gets the time of now. Raises the errors of `write` when it is called at once.
        """
        copy = self._copy(name, step, epoch, files, belongs)
        if copy is not None:
            self._put(name, partial(self._write_copy, copy, write))
            return
        self.wait()
        with Deadline(limits.seconds("save_s"), f"writing {name}"):
            write(files)

    def redo(self, step: int, write: Callable[[dict[str, Any], list[File]], object]) -> None:
        """Write what an earlier process could not complete, in the thread. `step`: from which this process goes on.

        Later saves are forgotten: this process comes to their steps again. `write` gets the guard file of the copy
        (name, step, epoch, belongs) and the files.
        """
        for path in self._copies():
            guard, wrong = checkpoint.guard_of(path), checkpoint.problems(path)
            if guard and not (self.snapshots.identity.items() <= guard.items() and guard["step"] <= step):
                guard = None  # of another run, of other settings, of another boot, or of a step that comes again
            if guard is not None:
                outcome = f"is lost: {'; '.join(wrong)}" if wrong else "is completed"
                print(f"hangproof: {guard['name']} was being saved when the training ended; it {outcome}", flush=True)
            if guard is None or wrong:
                shutil.rmtree(path)
                continue
            self._step = guard["step"]
            self._put(guard["name"], partial(self._write_copy, path, partial(write, guard)))

    def then(self, what: str, function: Callable[[], object]) -> None:
        """Call `function` after the saves so far: in the thread while they are under way, else at once."""
        if self.busy:
            self._put(what, function)
        else:
            self.check()
            function()

    def check(self) -> None:
        """Raise the error of a save that failed. Nothing is saved after it."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until everything is on the disk. Raises the error of a save that failed."""
        self._wait()
        self.check()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """The training has ended: what it had asked to save is completed, after an error, too."""
        self._wait()
        if error is None:
            self.check()
        elif self._error is not None and self._error is not error:
            print(f"hangproof: {self._what} was not saved: {self._error}", flush=True)

    def _copies(self) -> list[Path]:
        """The copies that are not written yet, oldest first."""
        folder = self.snapshots.folder
        return sorted(folder.glob(NAME + "*"), key=_number) if folder is not None else []

    def _copy(self, name: str, step: int, epoch: int, files: list[File], belongs: dict[str, Any] | None) -> Path | None:
        """The snapshot that holds a copy of the files; None where that is not possible."""
        if not self.snapshots.active or self.snapshots.folder is None:
            return None
        number = max(map(_number, self._copies()), default=0) + 1
        path = self.snapshots.folder / f"{NAME}{number}"
        try:
            plan = snapshot_files.plan(files)
            # Twice: a file of it is in the process's memory, too.
            self.snapshots.check_room(plan.bytes, plan.bytes, f"a copy of the state has {plan.bytes / 1e6:.0f} MB")
            path.mkdir()
            mapped, tensors = snapshot_files.create(path, plan.layout)
            snapshot_files.copy(tensors, plan.tensors)
            guard = {"name": name, "step": step, "epoch": epoch, **self.snapshots.about(belongs)}
            snapshot_files.complete(path, plan, mapped, guard)
        except (OSError, SnapshotError, MemoryError) as error:
            shutil.rmtree(path, ignore_errors=True)
            self._report_once("room", f"saves wait for the disk: {name} has no room in memory: {error}")
            return None
        return path

    def _put(self, what: str, function: Callable[[], object]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=THREAD, daemon=True)
            self._thread.start()
        if not self.busy and self._error is None:  # the error stays that of its own file
            self._what = what
        self._jobs.put((what, function))

    def _work(self) -> None:
        with contextlib.suppress(OSError):  # a thread has a priority of its own on Linux: training comes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), THREAD_NICE)
        while True:
            what, function = self._jobs.get()
            if self._error is None:  # what follows a save that failed would delete the states before it
                self._what = what
                try:
                    with Deadline(limits.seconds("save_s"), f"writing {what}"):
                        function()
                except Exception as error:  # noqa: BLE001 - the training raises it
                    self._error = error
            del function
            # The copies go when all of their step is done: until then, a kill makes the next process do it again.
            while self._written and self._jobs.unfinished_tasks == 1 and self._error is None:
                shutil.rmtree(self._written.pop(), ignore_errors=True)
            self._jobs.task_done()

    def _write_copy(self, path: Path, write: Callable[[list[File]], object]) -> None:
        written = write(snapshot_files.read(path))
        if isinstance(written, Path) and (guard := written / checkpoint.GUARD).is_file():
            # Sample images that were drawn meanwhile are newer: who resumes from this state draws none of them again.
            copied_s = (path / checkpoint.GUARD).stat().st_mtime
            os.utime(guard, (copied_s, copied_s))
        self._written.append(path)

    def _wait(self, limit_s: float = math.inf) -> bool:
        """Wait for the thread, in phase "save"; False: `limit_s` has passed before.

        An item is a look at which the thread has moved bytes: a slow disk makes progress, a hang does not.
        """
        if not self.busy or self._thread is None:
            return True
        before, until_s = self.beat.current_phase, time.monotonic() + limit_s
        counters = f"self/task/{self._thread.native_id}"
        items, bytes_before = 0, moved_bytes(counters)
        self.beat.phase("save", note=f"waiting for {self._what}, which is still being written")
        with self._jobs.all_tasks_done:
            while self.busy and time.monotonic() < until_s:
                self._jobs.all_tasks_done.wait(BEAT_POLL_S)
                # Where the system does not count bytes, each look is progress: only `save_s` then ends a save.
                if (moved := moved_bytes(counters)) is None or moved != bytes_before:
                    items, bytes_before = items + 1, moved
                    self.beat.item(items)
        self.beat.phase(before)
        return not self.busy

    def _report_once(self, reason: str, message: str) -> None:
        """Say it in the log and on the run's page, once for each reason."""
        if reason in self._messages:
            return
        self._messages.add(reason)
        print(f"hangproof: {message}", flush=True)
        if self.snapshots.run:
            with contextlib.suppress(OSError):  # a full disk: the log has it
                append_event(Path(self.snapshots.run), EVENT, message)


def _number(path: Path) -> int:
    return int(path.name.removeprefix(NAME)) if path.name.removeprefix(NAME).isdecimal() else 0
