"""One start of a run: kill what an earlier attempt left, choose the newest state that verifies, render, start.

`start_attempt` first makes sure that nothing of an earlier attempt is alive: whatever goes wrong, a run never has two
trainers. `Run` is what the supervisor, the recovery and a start share about one run.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from guards import checkpoint
from guards.heartbeat import Beat
from monitor import gpu
from monitor.attempt import Attempt
from monitor.config import Config
from monitor.detect.progress import Watch
from monitor.diagnose.incident import Incident
from monitor.gpu import GpuQueue
from monitor.phrases import count, duration
from monitor.process import spawned
from monitor.process.platform import ProcessInfo
from monitor.process.spawned import Subjob, Tree, helper, python
from monitor.resume import checkpoints, next_attempt
from monitor.resume.next_attempt import Standby
from monitor.run_folder import TRAINING_LOG, MonitorError, RunFolder
from monitor.state import EXIT_BUDGET, Observation, ResumePoint, RunState, State, Transition, spec_hash
from monitor.store import StoreAgent

# Before a start that failed for a passing reason is tried again: doubled each time.
FIRST_WAIT_S, LAST_WAIT_S = 1.0, 60.0
VERIFY_TRIES_COUNT = 5
# What a run takes along to another machine, of RunState's fields.
CARRIED = (
    *("attempt", "restarts", "best_step", "planned", "started_at", "gpu"),
    *("changes", "changes_at_save", "cause_counts", "ledger"),
)
NEEDS_GPU = "HANGPROOF_NEEDS_GPU"  # 1: this machine was rented for its GPU; 0: train without one all the same


class Interrupted(Exception):
    """A signal or a stop request arrived during a wait; the supervisor handles it first."""


class Unkillable(Exception):
    """Processes that SIGKILL did not end: no second writer may start while they live."""

    def __init__(self, processes: Sequence[ProcessInfo]):
        super().__init__(", ".join(f"{p.name} ({p.pid})" for p in processes))


class Run:
    """What supervisor and recovery share about one run."""

    def __init__(self, folder: RunFolder, config: Config):
        """Raises MonitorError: the saved state cannot be read."""
        self.folder, self.config = folder, config
        self.state = RunState.load(folder)
        self.gpus = gpu.Gpus()
        self.queue = GpuQueue(folder.name, folder.spec, self.gpus.listed)
        self.prewarm = next_attempt.Prewarm(folder, config.check.render_s)
        self.standby = Standby(folder, config.standby, config.end.kill_wait_s)
        self.store = StoreAgent(folder, config.store) if folder.spec.get("store") else None
        self.watch = Watch(config, self.state.durations)
        self.at = Transition(State.OPENING)
        self.attempt: Attempt | None = None  # the one that is watched, and how it was seen last
        self.view: Observation | None = None
        self.slow: dict[str, Any] = {}  # why its steps take longer (`diagnose/slow.py`); {} while they do not
        self.incident: Incident | None = None  # the last one, until a new step closes it
        self.tries = 0  # starts in a row that failed for a passing reason
        self.failing_since_s = self.wait_limit_s = 0.0  # when the first of them failed, and how long they may go on
        self.unkept: str | None = None  # at the end: why the newest steps are in memory only, "" for on the disk

    def pause(self, seconds: float) -> None:
        """Wait, and keep the status fresh; Interrupted when a signal or a stop request came."""
        raise NotImplementedError

    def report(self, state: State, message: str) -> None:
        """Show a state while a long step of it is under way."""
        raise NotImplementedError

    @property
    def several(self) -> bool:
        """Several machines train this run together."""
        return self.folder.machine is not None

    @property
    def leads(self) -> bool:
        """This machine writes the run's files: it is the only one, or that of rank 0."""
        return not self.folder.machine

    def state_folders(self) -> list[Path]:
        """Where states are: the run's folder and, where there is one, the folder that they are written to first.

        Of several machines, the others do not see that one: what was not copied from it is trained again.
        """
        first = Path(self.state.save_dir) if self.state.save_dir and not self.several else None
        return [self.folder.folder] + ([first] if first and first.is_dir() else [])

    def remaining_s(self) -> float:
        """Seconds until the machine is taken away; infinite without a SIGTERM."""
        shutdown = self.state.shutdown
        gone_by_s = shutdown.gone_by_s if shutdown else None
        return math.inf if gone_by_s is None else max(0.0, gone_by_s - time.monotonic())


def wait(seconds: float, message: str) -> Transition:
    """The next start comes after so many seconds."""
    return Transition(State.BACKOFF, message, time.monotonic() + seconds)


def already_started(run: Run) -> Attempt | None:
    """The attempt that `start_attempt` had started when an error of the monitor cut it short: it is watched, or its end judged."""
    record = run.state.current
    if record is None or record.number != run.state.attempt or run.several:
        return None
    attempt = Attempt.adopt(run.folder, record)
    if attempt is None:
        return None
    _report_start(run, attempt, "continues")
    return attempt


def start_attempt(run: Run) -> Attempt | Transition:
    """Start the next attempt from the newest checkpoint that verifies; what the system refuses is tried again.

    Raises:
        Unkillable: a process of an earlier attempt lives on.
    """
    try:
        return _start_attempt(run)
    except OSError as error:
        message = f"attempt {run.state.attempt + 1} cannot be started: {error.strerror or error}"
        return _try_again(run, message, run.config.restart.start_s)


def _start_attempt(run: Run) -> Attempt | Transition:
    state, folders = run.state, run.state_folders()
    kill_leftovers(run)
    for folder in folders if run.leads else ():
        checkpoint.sweep(folder)
    if (no_gpu := gpu_missing(run)) is not None:
        return no_gpu
    if missing := checkpoints.room_missing(folders):
        if state.attempt:
            return _try_again(run, missing, run.config.restart.disk_wait_s, EXIT_BUDGET)
        return Transition(State.FAILED, f"{missing}, then start the run again")
    if run.incident is None and not os.environ.get(next_attempt.CHECKED):
        try:
            problems = next_attempt.start_problems(run.folder, run.config.check.render_s, run.pause)
        except MonitorError as error:
            problems = [str(error)]
        if problems:
            return Transition(State.FAILED, "; ".join(problems))

    point = _choose(run, folders)
    _report_bad(run, point)
    if point.unsure and (point.path is None or run.tries + 1 < VERIFY_TRIES_COUNT):
        path, reason = point.unsure[0]
        message = f"{path.name} cannot be verified: {reason}. It is kept; the run does not start over"
        return _try_again(run, message, run.config.restart.start_s)
    if not run.leads:  # all machines train the same: what is changed is decided on the first one
        leader = RunState.load(RunFolder(run.folder.folder))
        state.changes, state.changes_at_save = leader.changes, leader.changes_at_save
    number, changes = state.attempt + 1, state.changes
    if number == 1 and point.path is not None:
        number = 2  # attempt 1 is train.sh itself, which starts at step 0
    try:
        rendered = run.prewarm.render(number, point.path, changes, state.changes_at_save, run.pause)
    except MonitorError as error:
        return Transition(State.FAILED, f"attempt {number} cannot be started: {error}")
    if not rendered.compatible:
        point = _start_over(run, point)

    try:
        limit, folder = run.config.restart.snapshots_bytes, run.folder.folder
        variables = {} if run.several else checkpoints.memory_variables(state.snapshots, folder, limit)
        standby = run.standby.release(rendered.script, point.path, variables, lambda attempt: _record(run, attempt))
        attempt = standby or _start_cold(run, number, rendered, point, variables)
    except OSError:
        state.current = None
        raise
    run.tries = 0
    state.ledger.starts(point.step)
    state.attempt, state.changes_at_save, state.save_dir = number, [c["name"] for c in changes], rendered.save_dir
    state.best_before, state.resumed_step, state.current = state.best_step, point.step, attempt.record
    state.save(run.folder)
    if run.incident is not None:
        run.incident.resumed_from, run.incident.from_memory = point.step, point.record is not None
        run.incident.standby = standby is not None
        run.incident.save(run.folder)
    where = "a snapshot in memory" if point.record else point.path.name if point.path else ""
    source = f"from step {point.step} ({where})" if point.path else "from the start"
    how = ", which had been started early" if standby else ""
    _report_start(run, attempt, source, how, **({"changes": state.changes_at_save} if changes else {}))
    return attempt


def _report_start(run: Run, attempt: Attempt, source: str, how: str = "", **known: Any) -> None:
    """The event of an attempt that has started, and what begins with it. known: more of the event."""
    kind, number = "restarted" if run.incident is not None else "started", attempt.record.number
    message = f"attempt {number} {source}, pid {attempt.pid}{how}"
    run.folder.event(kind, message, attempt=number, step=run.state.resumed_step, **known)
    if run.leads and run.folder.spec.get("trackers") == "trackio":
        start_tracker(run.folder)


def start_tracker(folder: RunFolder) -> None:
    """Start the process that logs the run to trackio. Never raises: a tracker cannot stop a run."""
    try:
        with open(folder.folder / "trackio.log", "ab") as log:
            helper(python("monitor.trackio_feed", str(folder.folder)), log)
    except OSError as error:
        folder.log(f"trackio could not be started: {error.strerror or error}; the run continues without it")


def _record(run: Run, attempt: Attempt) -> None:
    """Write what a later monitor needs to adopt this attempt."""
    run.state.current = attempt.record
    run.state.save(run.folder)


def _start_cold(
    run: Run, number: int, rendered: next_attempt.Rendered, point: ResumePoint, variables: dict[str, str]
) -> Attempt:
    """Start the script. OSError: it cannot be started, and nothing runs."""
    # Recorded before it starts: a monitor that is killed in between leaves a training that the next one can find.
    attempt = Attempt.prepare(run.folder, number)
    _record(run, attempt)
    resume = {"HANGPROOF_RESUME": str(point.path)} if point.path else {}
    try:
        attempt.announce(rendered.script, point.path)
        attempt.start(rendered.script, run.folder.own / TRAINING_LOG, {**variables, **resume}, run.queue.handles())
    except OSError:
        attempt.close()
        raise
    return attempt


def _choose(run: Run, folders: list[Path]) -> ResumePoint:
    """The newest state that can be resumed from: a snapshot in memory, or a checkpoint on the disk."""
    state, found = run.state, list[ResumePoint]()
    if not (run.folder.foreign or run.several) and run.config.restart.snapshots_bytes:
        state.snapshots, state.snapshots_off = checkpoints.memory_folder(run.folder.folder, state.snapshots)
        if sum(state.history.failures.values()) < checkpoints.FAILED_COUNT:
            found = _snapshots(run)
    return checkpoints.choose(folders, run.config.check.verify_s, run.pause, found, run.folder.log)


def _snapshots(run: Run, after_step: int = -1, room: bool = True) -> list[ResumePoint]:
    """The snapshots that a run may be resumed from; why others cannot is in the log. Arguments: as for `checkpoints.usable_snapshots`."""
    incident, folder = run.incident, run.folder.folder
    before_step = incident.evidence.step if incident is not None and incident.cause.damages_memory else math.inf
    return checkpoints.usable_snapshots(run.state.snapshots, folder, run.folder.log, before_step, after_step, room)


def keep_newest(run: Run, pause: Callable[[float], None]) -> str:
    """Write the newest snapshot to the run's folder when no checkpoint there is as new, before the memory is freed.

    Returns "", or why its steps are in memory only, which is not freed then. `pause` may raise; call it again then.
    """
    if not run.state.snapshots or run.unkept is not None:
        return run.unkept or ""
    on_disk = max(checkpoints.states(run.state_folders()).values(), default=0)
    found, unkept = _snapshots(run, on_disk, room=False), ""
    point = checkpoints.choose([], run.config.check.verify_s, pause, found)
    if point.record is not None:
        python = point.python if Path(point.python).is_file() else sys.executable
        command = [python, "-m", "guards.snapshot_files", str(point.record), str(run.folder.folder)]
        job = Subjob(command, min(run.config.end.stop_save_s, run.remaining_s()))
        job.wait(pause)
        if job.answer() is None:
            unkept = f"the newest steps, to step {point.step}, could not be written to the disk ({job.error}); "
            unkept += "they stay in memory until this machine is restarted, and a new start goes on from them"
        else:
            run.folder.log(f"the snapshot of step {point.step} was written to the disk")
    run.unkept = unkept
    return unkept


def gpu_missing(run: Run) -> Transition | None:
    """Why the run does not start on this machine, which has fewer GPUs than it needs; None when it may start.

    A stopped pod can come back without its GPU, and a training on its CPU would take weeks at the full price. A run
    that has trained on a GPU can be continued elsewhere (exit code 5); one that was to have its first GPU here is wrong
    here (4).
    """
    wish, trained_on = os.environ.get(NEEDS_GPU, ""), run.state.gpu
    if wish == "0" or not (trained_on or wish == "1"):
        return None
    needed, found = int(run.folder.spec.get("gpus", 1)), run.gpus.count(run.pause)
    if found is None or found >= needed:
        return None
    here = "this machine has none" if not found else f"this machine has {count(found, 'GPU')}"
    before = f"the run has trained on {trained_on}, and" if trained_on else f"the run needs {count(needed, 'GPU')}, and"
    what = "nothing is trained on the CPU. Start it on a machine with a GPU" if not found else f"it needs {needed}"
    reason = f"{before} {here}: {what} (or set {NEEDS_GPU}=0)"
    return Transition(State.PREEMPTED, reason) if trained_on else Transition(State.FAILED, reason, code=EXIT_BUDGET)


def note_gpu(run: Run, beats: Sequence[Beat]) -> None:
    """Record that the training uses a GPU, as its ranks say."""
    if not run.state.gpu and any(str(b.about.get("device", "")).startswith("cuda") for b in beats):
        run.state.gpu = gpu.model() or "a GPU"
        run.state.save(run.folder)


def adopt_restored(run: Run) -> str:
    """Continue the state of the machine that trained last, as restored to monitor.json; why nothing is left, or "".

    What depends on a machine (its attempt, its durations, its failures) is left behind.
    """
    state = run.state
    try:
        before = RunState.load(run.folder)
        names = [change["name"] for change in before.changes] + before.changes_at_save
        if not all(name.isidentifier() for name in names):
            raise ValueError("a mitigation has an invalid name")
        if not all(isinstance(getattr(before, name), int) for name in ("attempt", "restarts", "best_step", "planned")):
            raise ValueError("a count is not a number")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        run.folder.log(f"the monitor.json in the store cannot be used and is ignored: {error}")
        return ""
    for name in CARRIED:
        setattr(state, name, getattr(before, name))
    state.best_before = state.best_step
    state.ledger.follows()
    state.save(run.folder)
    same = before.spec_hash == spec_hash(run.folder.folder)
    if before.state is State.COMPLETED and same and run.folder.lora is not None:
        return f"already completed on another machine ({before.best_step} steps); LoRA: {run.folder.lora.name}"
    return ""


def kill_leftovers(run: Run, living: Attempt | None = None) -> None:
    """Kill every process that an earlier attempt left, and the standby of a killed monitor. living: is spared.

    Raises:
        Unkillable: one lives on.
        OSError: the processes of this machine cannot be read; then nothing may be started.
    """
    left = {p.pid: p for p in spawned.with_environment(spawned.RUN, str(run.folder.folder))}
    recorded = Attempt.adopt(run.folder, run.state.current) if run.state.current and living is None else None
    left |= recorded.tree.members if recorded else {}
    spared = run.standby.pids() | set(living.tree.refresh() if living else ())
    left = {pid: process for pid, process in left.items() if pid not in spared}
    if not left:
        return
    names = ", ".join(f"{p.name} ({p.pid})" for p in left.values())
    run.folder.event("killed", f"killing what an earlier attempt left: {names}")
    result = spawned.kill(Tree("", members=left), run.config.end.grace_s, run.config.end.kill_wait_s)
    if result.survivors:
        raise Unkillable(result.survivors)


def _try_again(run: Run, message: str, limit_s: float, code: int | None = None) -> Transition:
    """A reason that may pass (no memory to fork, a full disk): wait longer each time, at most `limit_s`.

    code: the exit code after that.
    """
    now_s = time.monotonic()
    if not run.tries or run.wait_limit_s != limit_s:
        run.tries, run.failing_since_s, run.wait_limit_s = 0, now_s, limit_s
        run.folder.event("backoff", message)
    run.tries += 1
    if (waited_s := now_s - run.failing_since_s) >= limit_s:
        return Transition(State.FAILED, f"{message} (tried {run.tries} times in {duration(waited_s)})", code=code)
    return wait(min(FIRST_WAIT_S * 2 ** (run.tries - 1), LAST_WAIT_S), message)


def _report_bad(run: Run, point: ResumePoint) -> None:
    for path, reason in point.bad:
        run.folder.event("checkpoint_bad", f"{path.name}: {reason}", path=str(path))
    for path, reason in point.unsure:
        run.folder.log(f"{path.name} cannot be verified now and is kept: {reason}")
    if run.incident is not None:
        run.incident.bad_checkpoints += [f"{p.name} ({reason})" for p, reason in point.bad]


def _start_over(run: Run, point: ResumePoint) -> ResumePoint:
    """The changed run cannot resume its states: they are kept aside, and the training starts at step 0."""
    for state in checkpoints.states(run.state_folders()) if run.leads else ():
        with contextlib.suppress(FileNotFoundError):
            aside = checkpoint.set_aside(state, "saved before a change of the run that is incompatible with it")
            message = f"{state.name} is incompatible with the changed run; kept as {aside.name}"
            run.folder.event("checkpoint_bad", message)
    checkpoints.clear_memory(run.state.snapshots)
    run.state.best_step = 0
    if run.incident is not None:
        run.incident.changed.append("the training starts over: its checkpoints are incompatible with this change")
    return ResumePoint(None, 0, point.bad)
