"""One attempt of a run under the real monitor, which never restarts it: what it took, and why it failed.

The rehearsal uses it. Decision: the monitor's own `Loop` with its setting `trial`, not a second loop that watches.
What fails is found, explained and killed exactly as in the run itself, and a resume is the monitor's own start from the
newest checkpoint. Besides, the limits are short, and what the attempt takes is measured.

It runs in a data folder of its own on the disk of the runs, which is removed. What a killed process left there is
killed and removed by the next one.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launch.common import LaunchError
from monitor import supervisor
from monitor.attempt import Attempt
from monitor.loop import Loop
from monitor.process import platform, spawned
from monitor.process.platform import LOCK as WATCHED
from monitor.process.platform import Lock
from monitor.resume.next_attempt import Standby
from monitor.run_folder import RunFolder
from monitor.state import Observation, State, Transition
from runs.paths import data_root

SCRATCH, NAME = ".scratch", "rehearsal"  # the data folder in that of the user; the run in it
LOCK = ".scratch.lock"  # held while it is used
STALLED_S = 20.0  # without progress, and with evidence, it hangs
POLL_S, TREE_S = 0.05, 1.0  # between two looks at the run, and at its processes
KILL_S = 5.0
QUEUE_S = 30.0  # for the driver to list its GPUs
MEMORY_S = 0.5  # between two readings
ENCODING = ("cache_latents", "cache_text", "hash")


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """The folder of the run to try, in a data folder that HANGPROOF_DATA names meanwhile. LaunchError: it is in use."""
    root, models, before = data_root() / SCRATCH, data_root() / "models.toml", os.environ.get("HANGPROOF_DATA")
    run = root / "outputs" / NAME
    lock, watched = Lock(data_root() / LOCK), Lock(run / WATCHED)
    if not lock.acquire():
        raise LaunchError("another run is being rehearsed; try again when that has ended")
    try:
        clear(run)
        watched.acquire()  # else its trainer would count as one that nobody watches
        if models.is_file():
            shutil.copyfile(models, root / "models.toml")
        os.environ["HANGPROOF_DATA"] = str(root)
        yield run
    finally:
        os.environ.pop("HANGPROOF_DATA", None)
        os.environ |= {"HANGPROOF_DATA": before} if before is not None else {}
        watched.release()
        clear(run)
        lock.release()


def clear(run: Path) -> None:
    """Kill what still trains in the scratch folder, and remove it."""
    left = {process.pid: process for process in spawned.with_environment(spawned.RUN, str(run))}
    spawned.kill(spawned.Tree("", members=left), 0.0, KILL_S)
    shutil.rmtree(run.parent.parent, ignore_errors=True)


class Trial:
    """An attempt, until it completes, fails or its time is over. `loop`: its monitor, with the evidence of a failure.

    busy: why it was not tried, such as a GPU that another run has. memory: host_bytes and, with a GPU, values that
    begin with gpu, at their peak. intervals: seconds of the last steps.
    """

    def __init__(self, run: Path, until_s: float, on_phase: Callable[[str, float], None]):
        """until_s: when its time is over. on_phase: called with each phase of the first rank, and when (monotonic)."""
        self.loop = loop = Loop(RunFolder(run), self._turn, trial=True)
        config, loop.on_view = loop.config, self._measure
        for phase in config.phases.values():
            phase.floor_s = phase.ceiling_s = STALLED_S
        config.watch.poll_min_s, config.watch.poll_max_s, config.watch.tree_s = POLL_S, POLL_S, TREE_S
        config.end.grace_s, config.end.kill_wait_s = 0.0, KILL_S
        config.restart.snapshots_bytes = config.standby.tries_count = 0
        loop.standby = Standby(loop.folder, config.standby, KILL_S)
        self.until_s, self._on_phase = until_s, on_phase
        self.busy = ""
        self.memory: dict[str, Any] = {}
        self.intervals: tuple[float, ...] = ()
        self._began_s = time.monotonic()
        self._memory_s = 0.0
        self._entered: tuple[int, str] = (0, "")
        self._items: dict[tuple[int, str], list[tuple[int, float]]] = {}

    def run(self) -> None:
        """Try it; nothing of the attempt lives on, whatever ends it."""
        try:
            self.loop.run_until_final()
        finally:
            if self.loop.attempt is not None:
                self.loop.attempt.kill(0.0, KILL_S)
                self.loop.attempt.close()

    def _turn(self, loop: Loop) -> Transition:
        """A turn of the monitor, while there is time. It starts at once, or not at all."""
        now_s, queue = time.monotonic(), loop.queue
        if now_s >= self.until_s:
            return Transition(State.FAILED, "It was still working when its time was over.")
        if loop.at.state is State.QUEUED and not queue.acquire() and now_s - self._began_s > QUEUE_S:
            self.busy = f"{queue.message}; try again when it is free"
            return Transition(State.FAILED, self.busy)
        started, result = loop.attempt is None, supervisor.turn(loop)
        if started and loop.attempt is not None:
            self._on_phase("import", time.monotonic())
        return result

    def _measure(self, attempt: Attempt, view: Observation) -> None:
        """What each observation of the attempt shows."""
        if view.now_s - self._memory_s >= MEMORY_S:
            self._memory_s = view.now_s
            self._measure_memory(attempt)
        first = next((beat for beat in view.beats if beat.rank == 0), None)
        if first is None:
            return
        items = self._items.setdefault((first.pid, first.phase), [])
        if first.done and (not items or items[-1][0] != first.done):
            items.append((first.done, first.beat_s))
        self.intervals = first.intervals or self.intervals
        if (first.pid, first.phase) != self._entered:
            same = first.pid == self._entered[0]
            self._entered = (first.pid, first.phase)
            self._on_phase(first.phase, first.phase_s if same else view.now_s)

    def _measure_memory(self, attempt: Attempt) -> None:
        memory, used = self.memory, platform.private_bytes(*attempt.tree.members)
        memory["host_bytes"] = max(memory.get("host_bytes", 0), used)
        for gpu in self.loop.gpus.read():
            used, total = int(gpu.get("memory_used") or 0), int(gpu.get("memory_total") or 0)
            # In a container the driver names no process, or those of another namespace: then all memory in use counts.
            memory.setdefault("gpu_before_bytes", used)
            if used > memory.get("gpu_bytes", 0):
                memory |= {"gpu_bytes": used, "gpu_total_bytes": total, "gpu": str(gpu.get("name", ""))}

    def image_s(self) -> float:
        """Seconds that each further image costs: from the first item to the last one, in each phase that encodes."""
        visits = ((items[0], items[-1]) for (_, phase), items in self._items.items() if phase in ENCODING and items)
        spans = [(last_s - first_s, last - first) for (first, first_s), (last, last_s) in visits]
        return round(sum(seconds / count for seconds, count in spans if count > 0), 4)
