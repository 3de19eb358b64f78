"""What all parts of the monitor share: the run's facts, its state, and the few verbs that every transition uses."""

from __future__ import annotations

from pathlib import Path

from guards.heartbeat import Beat
from monitor import checkpoints, limits, tree
from monitor.attempt import Attempt
from monitor.book import Book
from monitor.decide import Watch
from monitor.evidence import Evidence
from monitor.folder import FINAL, RunFiles
from monitor.foresight import Foresight
from monitor.gpu import Gpus
from monitor.incident import Incident
from monitor.inquiry import Inquiry
from monitor.locks import Lock
from monitor.notify import Notifier
from monitor.outlook import Outlook
from monitor.queue import GpuQueue
from monitor.report import count
from monitor.tree import Ended

EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_BUDGET, EXIT_PREEMPTED = 0, 1, 3, 4, 5


class Interrupted(Exception):
    """A signal came while something was waited for; the loop looks at it first."""


class Core:
    """The facts and the verbs; the transitions are in `Starting`, `Watching`, `Failing` and `Leaving`."""

    def __init__(self, folder: Path, lock: Lock, echo: bool = False, checked: bool = False):
        """`lock` is the run's, held."""
        self.limits = limits.load()
        self.files = RunFiles(folder, echo)
        self.book = Book.load(self.files)
        self.lock = lock
        self._checked = checked
        self.state = "queued"
        self.code = EXIT_FAILED
        self.message = ""
        self.attempt: Attempt | None = None
        self.watch = Watch(self.limits, self.book.known)
        self.verifier = checkpoints.Verifier(self.limits.check.verify)
        self.foresight = Foresight(self.files, self.verifier, self.limits.check.render)
        self.gpus = Gpus()
        self.queue = GpuQueue(self.files)
        self.outlook = Outlook(self)
        self.notifier = Notifier(self.files.name, self.files.log)
        self.files.on_event = self.notifier.event
        self.inquiry: Inquiry | None = None
        self.incident: Incident | None = None  # the last one, until a new step closes it
        self.beats: list[Beat] = []
        self.due_s = 0.0  # when the state's wait is over, monotonic
        self._signals: list[int] = []
        self._ending = ""  # "stopped" or "preempted" while stopping
        self._last_tree_s = self._calm_since_s = 0.0
        self._last_step_s: float | None = None
        self._launcher_alone_s: float | None = None
        self._orphan_said = False
        self.was_slow = ""  # why the suspicion under way was taken for slowness, in words
        self._room_since_s: float | None = None
        self._best_before = 0  # the furthest step before this attempt
        self.oom_kills_before = 0
        self._evidence: Evidence | None = None
        self.ended = Ended((), (), 0.0)

    def turn(self, state: str, message: str = "") -> None:
        """Enter a state."""
        self.state, self.message = state, message
        self.book.state = state
        self.outlook.write(force=True)

    def drop_inquiry(self) -> None:
        """What was suspected is over, one way or the other."""
        if self.inquiry is not None:
            self.inquiry.close()
            self.inquiry = None

    def finish(self, state: str, code: int, reason: str) -> None:
        """Enter a final state."""
        self.code = code
        self.outlook.write(force=True)  # a checkpoint made on the way out is told before the end
        self.book.reason = reason
        self.files.event(state if state in FINAL else "failed", reason)
        self.turn(state, reason)

    def pause(self, seconds: float) -> None:
        """Wait a little for a helper; Interrupted when a signal came."""
        self.waker.sleep(seconds)
        self.outlook.write()
        if self._signals or self.files.stop_asked() is not None:
            raise Interrupted

    def end_processes(self, grace_s: float, kill_wait_s: float | None = None) -> bool:
        """End whatever of the attempt lives; True when something would not die."""
        self.waker.watch(None)
        wait = self.limits.end.kill_wait if kill_wait_s is None else kill_wait_s
        self.ended = ended = tree.end(self.attempt.tree, grace_s, wait, at_once=[b.pid for b in self.beats])
        self.attempt.root_alive()
        if ended.killed:
            names = ", ".join(f"{p.name} ({p.pid})" for p in ended.killed)
            self.files.event("killed", f"ended {count(len(ended.killed), 'process')} in {ended.took_s:.1f} s: {names}")
        held = self.gpus.wait_free({p.pid for p in ended.killed}, self.limits.end.gpu_memory) if ended.killed else set()
        if held:
            self.files.log(f"the GPU still keeps memory for ended processes: {sorted(held)}")
        return bool(ended.left)

    def state_folders(self) -> list[Path]:
        """Where states are: the run's folder, and the place they are written to first, where there is one."""
        first = Path(self.book.save_dir) if self.book.save_dir else None
        return [self.files.folder] + ([first] if first and first.is_dir() else [])

    def _step(self) -> int:
        return max([self.book.best_step, *(b.step for b in self.beats)])
