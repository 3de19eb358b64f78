"""One attempt of a run under the real monitor, which never restarts it: what it took, and why it failed.

The rehearsal uses it. Decision: a subclass of the monitor's own `Supervisor`, instead of a second loop that watches.
What fails is found, explained and killed exactly as in the run itself, and a resume is the monitor's own start from the
newest checkpoint. Only four things differ: a failure ends the attempt; the limits are short; without
evidence nothing hangs, because a compiler may take its time; and nobody is notified.

It runs in a data folder of its own on the disk of the runs, which is removed. What a killed process left there is killed
and removed by the next one.
"""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from launch.common import LaunchError
from monitor import recovery
from monitor.attempt import Attempt
from monitor.detect.progress import HUNG, SUSPECT, Observation, Verdict
from monitor.diagnose.collect import Evidence
from monitor.process import platform, tree
from monitor.process.locks import LOCK as WATCHED
from monitor.process.locks import Lock
from monitor.run_folder import RunFolder
from monitor.standby import Standby
from monitor.state import State, Transition
from monitor.supervisor import Supervisor
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
    """The folder of the run to try, in a data folder with the user's own base models, which HANGPROOF_DATA of this process
    names meanwhile. LaunchError: another process uses it."""
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
    left = {process.pid: process for process in tree.with_environment(tree.RUN, str(run))}
    tree.kill(tree.Tree("", members=left), 0.0, KILL_S)
    shutil.rmtree(run.parent.parent, ignore_errors=True)


def end_on_sigterm() -> None:
    """From now on SIGTERM leaves this process as Ctrl-C does: on the way out, what was started is killed."""

    def terminated(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, terminated)


class Trial(Supervisor):
    """An attempt, until it completes, fails or its time is over.

    evidence: of its failure. busy: why it was not tried, such as a GPU that another run has. memory: host_bytes and, with
    a GPU, values that begin with gpu, at their peak. intervals: seconds of the last steps.
    """

    def __init__(self, run: Path, until_s: float, on_phase: Callable[[str, float], None]):
        """until_s: when its time is over. on_phase: called with each phase that the first rank enters, and when. Both monotonic."""
        super().__init__(RunFolder(run), False, None, ())
        self.folder.on_event = lambda kind, message: None
        for phase in self.config.phases.values():
            phase.floor_s = phase.ceiling_s = STALLED_S
        watch = self.config.watch
        watch.poll_min_s, watch.poll_max_s, watch.tree_s = POLL_S, POLL_S, TREE_S
        self.config.restart.snapshots_bytes = self.config.standby.tries_count = 0
        self.run.standby = Standby(self.folder, self.config.standby, self.config.end)
        self.until_s, self._on_phase = until_s, on_phase
        self.evidence: Evidence | None = None
        self.busy = ""
        self.memory: dict[str, Any] = {}
        self.intervals: tuple[float, ...] = ()
        self._began_s = time.monotonic()
        self._memory_s = 0.0
        self._entered: tuple[int, str] = (0, "")
        self._items: dict[tuple[int, str], list[tuple[int, float]]] = {}

    def run_until_final(self) -> int:
        """The loop; nothing of the attempt lives on, whatever ends it."""
        try:
            return super().run_until_final()
        finally:
            if self.attempt is not None:
                self.attempt.kill(0.0, KILL_S)
                self.attempt.close()

    def listen(self) -> None:
        """SIGTERM and Ctrl-C end this process: there is nothing to save."""
        platform.become_subreaper()

    def turn(self) -> Transition:
        """A turn of the monitor, while there is time."""
        late = time.monotonic() >= self.until_s
        return Transition(State.FAILED, "It was still working when its time was over.") if late else super().turn()

    def queued(self) -> Transition:
        """Start at once, or not at all."""
        if not self.run.queue.acquire() and time.monotonic() - self._began_s > QUEUE_S:
            self.busy = f"{self.run.queue.message}; try again when it is free"
            return Transition(State.FAILED, self.busy)
        return super().queued()

    def judge(self, view: Observation) -> Verdict:
        """The monitor's verdict; without evidence it does not hang."""
        verdict = super().judge(view)
        return replace(verdict, kind=SUSPECT) if verdict.kind == HUNG and not verdict.evidence else verdict

    def recover(self, attempt: Attempt, evidence: Evidence | None, progress_s: float = 0.0) -> Transition:
        """A failure ends it."""
        self.evidence = evidence
        recovery.kill_processes(self.run, attempt, 0.0, KILL_S)
        return Transition(State.FAILED, "it failed")

    def report_ledger(self) -> None:
        """Nothing: this is no run of the user's."""

    # ---- measurements ----

    def attach(self, attempt: Attempt) -> None:
        """The script has started."""
        super().attach(attempt)
        self._on_phase("import", time.monotonic())

    def observe(self, attempt: Attempt, fresh: bool = False) -> Observation:
        """Poll the attempt, and measure."""
        view = super().observe(attempt, fresh)
        if view.now_s - self._memory_s >= MEMORY_S:
            self._memory_s = view.now_s
            self._measure_memory(attempt)
        first = next((beat for beat in view.beats if beat.rank == 0), None)
        if first is None:
            return view
        items = self._items.setdefault((first.pid, first.phase), [])
        if first.done and (not items or items[-1][0] != first.done):
            items.append((first.done, first.beat_s))
        self.intervals = first.intervals or self.intervals
        if (first.pid, first.phase) != self._entered:
            same = first.pid == self._entered[0]
            self._entered = (first.pid, first.phase)
            self._on_phase(first.phase, first.phase_s if same else view.now_s)
        return view

    def _measure_memory(self, attempt: Attempt) -> None:
        memory, used = self.memory, sum(map(platform.private_bytes, attempt.tree.members))
        memory["host_bytes"] = max(memory.get("host_bytes", 0), used)
        for gpu in self.run.gpus.read():
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
