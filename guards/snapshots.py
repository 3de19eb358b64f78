"""Snapshots in memory: after nearly every step, what the next step needs is copied into shared memory.

Decision: the two newest are state folders (snapshot_files.py) in a folder that the monitor makes under /dev/shm. They
survive the process, however it dies, and a restart goes on from the newest. The tensors are copied between two steps,
when nothing changes them; checksum and guard file follow in a thread, and the snapshot counts from then on. The older
one is written over: new memory costs as much as the copy.

From a GPU the copy goes through pinned memory on the stream on which the training computes, between the kernels of two
steps. So the processor does not wait for it; the next step's kernels, which change or free these tensors, run after it
on the same stream, which needs no other stream to be synchronized and no `record_stream`; and an event behind it tells
the thread that the pinned memory is filled. The GPU computes nothing meanwhile, which counts as cost. A state with
tensors on several GPUs has no snapshots: one event says nothing of another GPU's stream. docs/measurements.md has what
copies from an H200 cost. **Not tested**: pinned memory that cannot be had.

A snapshot may cost 1 % of the training's time: what it adds to a step, and on a CPU what its thread uses there. So it
is taken every N steps, with the smallest N that keeps this. Where it does not fit into memory it is off, and the
monitor shows why.

    HANGPROOF_SNAPSHOTS        the folder; unset: no snapshots
    HANGPROOF_SNAPSHOTS_SPEC   the checksum of the run's settings: a snapshot of other settings is not used
    HANGPROOF_SNAPSHOTS_BYTES  the most memory that they may take, 0 for none
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import queue
import shutil
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guards import checkpoint, limits, reading, snapshot_files
from guards.reading import boot_id, number
from guards.snapshot_files import LIMIT, OFF, RESUMED, RING, SPEC, File, Layout, Plan, SnapshotError

KEPT = 2  # snapshots
NEXT = "next"  # the folder of the one under way

SHARE = 0.009  # of the training's time; 1 % is promised, and both are measured on a machine that does other things
RESERVE = 1 << 30  # bytes of memory, and of /dev/shm, that stay free; half of what is free where that is less
LOW = 256 << 20  # bytes of memory; with less left than that, the snapshots give theirs back
COPIES = 3  # two snapshots, and the state that a restart makes from one, or later the copy that a save writes
INLINE = 1 << 20  # bytes; a smaller snapshot is completed in the step: a thread would cost more
MEMORY_POLL_S = 10.0  # between two looks at the free memory
THREAD_NICE = 5


@dataclass
class _Slot:
    """One of the snapshots. folder: None for one that is not complete. The rest: as this process wrote it."""

    folder: Path | None = None
    step: int = -1
    layout: Layout | None = None
    mapped: mmap.mmap | None = None
    tensors: list[Any] = field(default_factory=list)


@dataclass
class _Job:
    """A snapshot whose tensors are copied, or on their way from the GPU."""

    slot: _Slot
    plan: Plan
    folder: Path  # its own, once it is complete
    guard: dict[str, Any]
    fresh: bool = False  # in new memory: its cost says nothing about the next one's
    staged: Any = None  # (pinned tensor, first event, last event)
    cost_s: float = 0.0  # in the step


class Snapshots:
    """The writer, one for each training process. Without a folder, and where `off` says why, nothing is done."""

    def __init__(
        self,
        folder: Path | None,
        run: str = "",
        spec: str = "",
        attempt: int = 1,
        limit_bytes: float = math.inf,
        off: str = "",
    ) -> None:
        self.folder = folder
        self._next = Path(folder or os.devnull, NEXT)
        self.off = off
        self.limit_bytes = limit_bytes
        self.every = 1
        self.run = run
        self.identity = {"run": run, "spec": spec, "boot": boot_id()}
        self._attempt = attempt
        found = checkpoint.guards(folder) if folder else {}
        known = [_Slot(path, guard["step"]) for path, guard in found.items() if guard is not None]
        self._slots = [*known, *(_Slot() for _ in range(KEPT))][:KEPT]
        self._resumed = True  # perhaps from one of them
        self._durations: deque[float] = deque(maxlen=21)  # seconds of steps
        self._costs: deque[float] = deque(maxlen=5)  # seconds of snapshots
        self._last_s: float | None = None  # the end of the last boundary
        self._begun_s = self._begun_cpu_s = 0.0
        self._since = 0  # steps since the last snapshot
        self._memory_s = -math.inf
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._failed = ""  # of the thread
        self._layout: Layout | None = None  # of the last state
        self._pinned: Any = None
        self._pinned_views: tuple[Layout | None, list[Any]] = None, []
        if folder is not None and off:
            self.turn_off(off)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Snapshots:
        """Those of the attempt that the monitor has started."""
        folder = environ.get(RING, "")
        if not folder or not os.path.isdir(folder) or number("RANK", 0, environ):
            return cls(None)
        several = number("WORLD_SIZE", 1, environ) > 1
        return cls(
            Path(folder),
            environ.get("HANGPROOF_RUN", ""),
            environ.get(SPEC, ""),
            number("HANGPROOF_ATTEMPT", 1, environ),
            float(environ.get(LIMIT, math.inf)),
            off="the run trains with several processes, and a snapshot would hold the state of one" if several else "",
        )

    @property
    def active(self) -> bool:
        """Whether snapshots are taken."""
        return self.folder is not None and not self.off

    def due(self) -> bool:
        """Whether a snapshot is to be taken now. Called once at each step boundary; `take` follows when it is True."""
        if not self.active:
            return False
        now_s = time.monotonic()
        if self._last_s is not None:
            self._durations.append(now_s - self._last_s)
        self._last_s = self._begun_s = now_s
        self._begun_cpu_s = time.thread_time()
        self._since += 1
        if self._failed:
            self.turn_off(self._failed)
            return False
        if now_s - self._memory_s >= MEMORY_POLL_S:
            self._memory_s = now_s
            left = reading.available_bytes()
            if left is not None and left < LOW:
                self.turn_off(f"the machine has {left / 1e6:.0f} MB of memory left")
                return False
        return self._since >= self.every and self._idle.is_set()

    def take(self, name: str, step: int, epoch: int, files: list[File], belongs: dict[str, Any] | None = None) -> None:
        """Copy the state of `step` (completed, as is `epoch`) over the older snapshot. `name`: of the state's folder.

        Never raises for what a snapshot lacks: then the snapshots are off.
        """
        try:
            plan = snapshot_files.plan(files, self._layout)
            self._layout = plan.layout
            for slot in self._slots:  # of an attempt that got further than the state from which this one goes on
                if slot.step >= step:
                    self._forget(slot)
            slot = min(self._slots, key=lambda slot: slot.step)
            guard = {"step": step, "epoch": epoch, **self.about(belongs)}
            job = _Job(slot, plan, self._next.with_name(name), guard, self._begin(slot, plan))
            job.staged = self._copy(slot, plan)
            # On a CPU its thread's own time: other programs would make the snapshot look as expensive as the step.
            # With a GPU the wall time, because a thread that waits for the GPU keeps it from getting work.
            on_gpu = job.staged is not None
            job.cost_s = time.monotonic() - self._begun_s if on_gpu else time.thread_time() - self._begun_cpu_s
            self._since = 0
            if plan.bytes <= INLINE and not on_gpu:
                self._finish(job)
            else:
                self._idle.clear()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="hangproof-snapshots", daemon=True)
                    self._thread.start()
                self._jobs.put(job)
            self._last_s = time.monotonic()
        except SnapshotError as error:
            self.turn_off(str(error))
        except (OSError, MemoryError) as error:
            self.turn_off(f"the state of step {step} has no room in memory: {error}")

    def _begin(self, slot: _Slot, plan: Plan) -> bool:
        """Make the folder NEXT, from the snapshot in `slot` where its tensors fit. Whether it has new memory."""
        if slot.folder is not None and slot.layout is plan.layout:
            os.replace(slot.folder, self._next)
            slot.folder, slot.step = None, -1
            return False
        self._forget(slot)
        size = plan.bytes
        held = sum(len(other.mapped) for other in self._slots if other.mapped is not None)
        # One more copy is in pinned memory; torch rounds it up to a power of two.
        pinned = 2 * size if self._pinned is None and any(tensor.is_cuda for tensor in plan.tensors) else 0
        if COPIES * size > self.limit_bytes:
            allowed = f"snapshots_bytes allows {self.limit_bytes / 1e6:.0f} MB"
            raise SnapshotError(f"they need {COPIES * size / 1e6:.0f} MB, and {allowed}")
        what = f"a state has {size / 1e6:.0f} MB and needs {COPIES} times that"
        self.check_room(COPIES * size - held, pinned, what)
        self._next.mkdir()
        slot.mapped, slot.tensors = snapshot_files.create(self._next, plan.layout)
        slot.layout = plan.layout
        return True

    def check_room(self, shared: int, private: int, what: str) -> None:
        """Raises SnapshotError, with `what`, unless so many bytes fit, in shared memory and of the process's own."""
        assert self.folder is not None
        found = os.statvfs(self.folder)
        places = [(f"{self.folder.parent.parent} has", found.f_bavail * found.f_frsize, shared)]
        left = reading.available_bytes()
        if left is not None:
            places.append(("the machine or its container has", left, shared + private))
        for where, free, need in places:
            if need > free - min(RESERVE, free // 2):
                raise SnapshotError(f"{what}, and {where} {free / 1e6:.0f} MB free")

    def about(self, belongs: dict[str, Any] | None = None) -> dict[str, Any]:
        """What the guard file of a snapshot says beside its step. belongs: for the guard file of its state."""
        about = {**self.identity, "attempt": self._attempt, "every": self.every, "python": sys.executable}
        return about | ({"belongs": belongs} if belongs is not None else {})

    def _copy(self, slot: _Slot, plan: Plan) -> Any:
        """Copy the tensors; from a GPU they are only on their way when this returns (`_Job.staged`, else None)."""
        gpus = {tensor.device for tensor in plan.tensors if tensor.is_cuda}
        if len(gpus) > 1:
            raise SnapshotError(f"the state's tensors are on {len(gpus)} GPUs")
        if not gpus:
            return snapshot_files.copy(slot.tensors, plan.tensors)
        import torch

        layout = plan.layout
        if self._pinned is None or self._pinned.numel() < layout.end:
            self._pinned, self._pinned_views = None, (None, [])
            size = layout.end + layout.end // 8
            try:
                self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:  # of CUDA; an error of the training itself comes again at its next operation
                raise SnapshotError(f"no pinned memory of {size / 1e6:.0f} MB: {error}") from error
        if self._pinned_views[0] is not layout:
            self._pinned_views = layout, snapshot_files.views(self._pinned, layout.places)
        # The events are on the current stream of the tensors' GPU, as the copies.
        with torch.cuda.device(gpus.pop()):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            snapshot_files.copy(self._pinned_views[1], plan.tensors, non_blocking=True)
            last.record()
        return self._pinned, first, last

    def _work(self) -> None:
        """The thread: completes one snapshot after the other."""
        with contextlib.suppress(OSError):  # a thread has a priority of its own on Linux: training comes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), THREAD_NICE)
        while True:
            job = self._jobs.get()
            try:
                self._finish(job)
            except (OSError, RuntimeError, ValueError, MemoryError) as error:  # RuntimeError: CUDA's
                self._failed = f"the snapshot of step {job.guard['step']} failed: {error}"
            del job
            self._idle.set()

    def _finish(self, job: _Job) -> None:
        """Complete a snapshot whose tensors are copied, and count its cost."""
        assert self.folder is not None
        slot, plan, began_s, gpu_s = job.slot, job.plan, time.thread_time(), 0.0
        if job.staged is not None:
            import numpy

            pinned, first, last = job.staged
            last.synchronize()
            gpu_s = first.elapsed_time(last) / 1e3
            # numpy releases the GIL, which the training needs to give the GPU work.
            target = numpy.frombuffer(slot.mapped, dtype=numpy.uint8, offset=len(plan.layout.header))
            numpy.copyto(target, pinned.numpy()[: plan.layout.end])
        snapshot_files.complete(self._next, plan, slot.mapped, job.guard)
        os.replace(self._next, job.folder)
        slot.folder, slot.step = job.folder, job.guard["step"]
        if self._resumed:  # there is a newer snapshot
            shutil.rmtree(self.folder / RESUMED, ignore_errors=True)
            self._resumed = False
        if not job.fresh:
            self._costs.append(job.cost_s + (gpu_s if job.staged is not None else time.thread_time() - began_s))
            self._set_every()

    def _set_every(self) -> None:
        """How often from now on: the cost of a snapshot, spread over `every` steps, is at most SHARE of their time.

        One slow snapshot must not put the next one far away, so `every` at most doubles with each.
        """
        step_s = statistics.median(self._durations) if self._durations else 0.0  # 0: before the second step
        wanted = math.ceil(statistics.median(self._costs) / (SHARE * step_s)) if step_s else 1
        self.every = max(1, min(wanted, 2 * self.every))

    def wait(self) -> None:
        """Wait until the snapshot under way is complete."""
        self._idle.wait(limits.seconds("snapshot_s"))

    def turn_off(self, reason: str) -> None:
        """No more snapshots: give the memory back, and say why."""
        self.off = reason
        self.wait()
        self._pinned, self._pinned_views = None, (None, [])
        for slot in self._slots:
            self._forget(slot)
        print(f"hangproof: snapshots in memory are off: {reason}", flush=True)
        if self.folder is not None:
            with contextlib.suppress(OSError):  # no room even for that: the log says it
                checkpoint.atomic_write(self.folder / OFF, reason)

    def _forget(self, slot: _Slot) -> None:
        """Remove the snapshot in `slot`, complete or not."""
        assert self.folder is not None
        if slot.folder is not None:
            shutil.rmtree(slot.folder, ignore_errors=True)
        shutil.rmtree(self._next, ignore_errors=True)
        slot.folder, slot.step, slot.layout, slot.mapped, slot.tensors = None, -1, None, None, []
