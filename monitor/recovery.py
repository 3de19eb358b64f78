"""From the evidence on a failure to the next attempt: diagnose, kill, decide, say what follows, and start it.

Each function can be called again after an error in its middle. What must not happen twice (counting the failure) is
committed to the RunState in one step at the end. `start_attempt` first makes sure that nothing of an earlier attempt is
alive: whatever goes wrong, a run never has two trainers.

Restart or stop is a pure rule (`History.after_failure`): progress counts, not restarts. A failure has a fingerprint
(phase, step, cause). The first failure since new steps were made is answered at once: nothing is gained by waiting, and the
time from the hang to the next new step is what a user pays. After that, waiting may help (another program's memory, a
network), so 10 s, 20 s, 40 s … 300 s. The third failure with one fingerprint and no new step ends the run, unless its
ladder still has a change to try. Ten restarts in all; ten minutes of new steps give back the ten and reset the waiting,
so a run of three days with a hang an hour finishes.
"""

from __future__ import annotations

import filecmp
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from guards import checkpoint
from guards.checkpoint import writing_file
from guards.heartbeat import Beat
from monitor import gpu
from monitor.attempt import Attempt, kill_leftovers, kill_processes
from monitor.config import Config
from monitor.detect.progress import Watch
from monitor.diagnose import causes
from monitor.diagnose.causes import Evidence
from monitor.diagnose.incident import RESTARTING, Incident
from monitor.gpu import GpuQueue
from monitor.phrases import PHASES, count, duration
from monitor.process import platform
from monitor.process.spawned import helper, python
from monitor.resume import checkpoints, next_attempt
from monitor.resume.next_attempt import Standby
from monitor.run_folder import SCRIPT, TRAINING_LOG, MonitorError, RunFolder, print_line
from monitor.state import EXIT_AGAIN, EXIT_BUDGET, Observation, ResumePoint, RunState, State, Transition
from monitor.store import StoreAgent

# Before a start that failed for a passing reason is tried again: doubled each time.
FIRST_WAIT_S, LAST_WAIT_S = 1.0, 60.0
VERIFY_TRIES_COUNT = 5
NEEDS_GPU = "HANGPROOF_NEEDS_GPU"  # 1: this machine was rented for its GPU; 0: train without one all the same


class Interrupted(Exception):
    """A signal or a stop request arrived during a wait; the supervisor handles it first."""


class Run:
    """What supervisor and recovery share about one run."""

    pause: Callable[[float], None]  # waits, and keeps the status fresh; Interrupted: a signal or a stop request came

    def __init__(self, folder: RunFolder, config: Config):
        """Raises MonitorError: the saved state cannot be read."""
        self.folder, self.config = folder, config
        self.state = RunState.load(folder)
        if self.state.problem:
            folder.log(self.state.problem)
        self.gpus = gpu.Gpus()
        self.queue = GpuQueue(folder.name, folder.spec, self.gpus.listed)
        self.prewarm, self.standby = next_attempt.Prewarm(self), Standby(self)
        self.store = StoreAgent(folder, config.store) if folder.spec.get("store") else None
        self.watch = Watch(config, self.state.durations)
        self.at = Transition(State.OPENING)
        self.attempt: Attempt | None = None  # the one that is watched, and how it was seen last
        self.view: Observation | None = None
        self.slow: dict[str, Any] = {}  # why its steps take longer (`diagnose/slow.py`); {} while they do not
        self.incident: Incident | None = None  # the last one, until a new step closes it
        self.tries = 0  # starts in a row that failed for a passing reason
        self.tries_since_s = self.wait_limit_s = 0.0  # when the first of them failed, and how long they may go on
        self.unkept: str | None = None  # at the end: why the newest steps are in memory only, "" for on the disk

    @property
    def several(self) -> bool:
        """Several machines train this run together."""
        return self.folder.machine is not None

    @property
    def leads(self) -> bool:
        """This machine writes the run's files: it is the only one, or that of rank 0."""
        return not self.folder.machine

    @property
    def keeps_snapshots(self) -> bool:
        """Its training may keep snapshots in memory."""
        return not (self.folder.foreign or self.several) and self.config.restart.snapshots_bytes > 0

    def state_folders(self) -> list[Path]:
        """Where states are: the run's folder and, where there is one, the folder that they are written to first.

        Of several machines, the others do not see that one: what was not copied from it is trained again.
        """
        first = Path(self.state.save_dir) if self.state.save_dir and not self.several else None
        return [self.folder.folder] + ([first] if first and first.is_dir() else [])

    def record(self, attempt: Attempt) -> None:
        """Write what a later monitor needs to adopt this attempt."""
        self.state.current = attempt.record
        self.state.save(self.folder)

    def remaining_s(self) -> float:
        """Seconds until the machine is taken away; infinite without a SIGTERM."""
        shutdown = self.state.shutdown
        gone_by_s = shutdown.gone_by_s if shutdown else None
        return math.inf if gone_by_s is None else max(0.0, gone_by_s - time.monotonic())


def recover(run: Run, attempt: Attempt, incident: Incident) -> Transition:
    """Answer the failure that `open_incident` has recorded.

    Returns what follows: BACKOFF before a restart, an end, or COMPLETED when the training was complete.

    Raises:
        Unkillable: a process of the attempt lives on.
    """
    state, evidence, cause = run.state, incident.evidence, incident.cause
    kill_processes(run, attempt)
    view = attempt.poll(platform.now(), 0.0, fresh=True)
    if evidence.kind == "hang" and attempt.exit_status(view.beats).done(run.folder.foreign, killed=True):
        problem = complete(run)
        if not problem:
            incident.outcome = "the training was complete; only its process had not exited"
            return Transition(State.COMPLETED)
        run.folder.log(f"{problem}; the last checkpoint is used to write it again")

    cause_count = state.cause_counts.get(cause.name, 0) + 1
    change, limits, history = dict[str, Any](), run.config.restart, state.history
    mark = f"{evidence.phase}/{evidence.step}/{cause.name}"  # the same failure twice has the same fingerprint
    # From a cause's second failure on, or at once where it is certain to return.
    due = cause_count >= 2 or cause.at_once
    if cause.outside:
        due = history.failures.get(mark, 0) + 1 >= limits.without_progress_count
    may_restart = history.restarts < limits.in_all_count
    if may_restart and run.leads and cause.ladder and due:
        # While restarts bring new steps, no change may cost the steps so far: another program's memory gets free again.
        keeps = state.best_step > 0 and not history.failures and history.restarts < limits.without_progress_count
        change = next_attempt.next_change(run, cause.ladder, keeps)
    history, stop, wait_s = history.after_failure(mark, bool(change), limits, cause.wait_s)
    # Without a heartbeat, as of a user's own script, nobody knows whether it has trained.
    trained = state.best_step or (run.folder.foreign and not view.beats)
    if not (cause.restart or (cause.may_return and trained)):
        stop = "a restart cannot help"
    if stop:
        checkpoints.keep_newest(run, run.pause)  # the message names the checkpoint that is kept
        code = EXIT_BUDGET if cause.restart else None
        result = Transition(State.FAILED, _close_given_up(run, incident, stop), code=code)
    else:
        restarting = f"restarting in {wait_s:.0f} s" if wait_s else "restarting"
        result = Transition(State.BACKOFF, f"{cause.title}; {restarting}", time.monotonic() + wait_s)
        if run.several:
            result = Transition(State.PREEMPTED, f"{result.message} with all machines", code=EXIT_AGAIN)
        if change:
            incident.changed.append(change["sentence"])
            patch = {name: value for name, value in change["patch"].items() if name != "spec"}
            run.folder.event("mitigated", change["sentence"], change=change["name"], patch=patch)
        if wait_s:
            run.folder.event("backoff", restarting)
        incident.save(run.folder)
    attempt.close()
    # Nothing below can fail: the failure is counted once.
    state.history, state.cause_counts[cause.name] = history, cause_count
    state.failing, state.current = False, None
    if not stop:
        state.restarts += 1
        state.changes += [change] if change else []
    state.save(run.folder)
    return result


def open_incident(run: Run, attempt: Attempt, evidence: Evidence, progress_s: float) -> Transition:
    """Name the cause of a failure and write its incident: from here on a later monitor can answer it, too.

    progress_s: when the last progress was (monotonic).
    """
    cause, since_s = causes.match(evidence), max(0.0, time.monotonic() - progress_s)
    summary, phase, step = _summary(evidence), evidence.phase, evidence.step
    run.folder.event(evidence.kind, f"{cause.title}: {summary}", phase=phase, step=step, since_s=round(since_s, 3))
    if run.incident is not None:
        run.incident.close(run.folder, "the restart after it failed as well")
    number, best_step = attempt.record.number, run.state.best_step
    incident = Incident.open(run.folder, evidence, cause, number, progress_s, best_step=best_step, detect_s=since_s)
    run.incident, run.state.incident, run.state.failing = incident, incident.number, True
    run.state.ledger.fails(since_s)
    run.state.save(run.folder)
    run.folder.log(f"incident {incident.number}: {cause.title}. {cause.explanation}")
    return Transition(State.RECOVERING, summary)


def evidence_of(run: Run, attempt: Attempt, kind: str) -> Evidence:
    """What the run itself knows of a failure: causes.of_hang and of_crash add the rest."""
    tail, gpus = attempt.log_tail(run.config.check.log_tail_bytes), list(run.gpus.read())
    known, own = run.state, gpu.own(gpus, run.queue.devices)
    return Evidence(
        kind, step=known.best_step, planned=known.planned, log_tail=tail, gpu=gpus, gpu_note=run.gpus.note,
        other_gpus=[one["bus"] for one in gpus if own and one not in own and "bus" in one],
    )  # fmt: skip


def _summary(evidence: Evidence) -> str:
    where = f"{PHASES.get(evidence.phase, evidence.phase)}, step {evidence.step}"
    if evidence.kind == "crash":
        return f"{where}: {evidence.ended}"
    signs = f" ({'; '.join(evidence.signs)})" if evidence.signs else ""
    return f"{where}: no progress for {evidence.stalled_s:.1f} s{signs}"


def load_incident(run: Run) -> None:
    """Take up the incident that an earlier monitor left open. One that cannot be read is forgotten with its failure."""
    number = run.state.incident
    if number:
        run.incident = Incident.load(run.folder.own / "incidents" / number)
        if run.incident is None:
            run.folder.log(f"incident {number} cannot be continued: its incident.json is missing or damaged")
            run.state.failing, run.state.incident = False, ""
        elif run.state.failing:  # it may have been closed for as long as a process could not be killed
            run.incident.outcome = RESTARTING
        elif run.incident.recover_s is not None:
            run.incident = None  # closed already


def close_incident(run: Run, view: Observation, first_new: int) -> None:
    """Step `first_new` is the first one beyond those reached before the failure: the run has recovered."""
    incident, run.incident, run.state.incident, run.state.failing = run.incident, None, "", False
    if incident is None:
        return
    first = max(view.beats, key=lambda b: b.step)
    later = first.step - first_new  # steps since, whose durations the record keeps: they date `first_new`
    at_s = first.step_s - (sum(first.intervals[-later:]) if later else 0.0)
    incident.recovered(run.folder, at_s, f"the run recovered: step {first_new} is new")
    run.state.save(run.folder)
    repeated = count(incident.steps_repeated or 0, "step")
    message = f"step {first_new} is new: recovered in {incident.recover_s:.1f} s, {repeated} trained twice"
    run.folder.event("progress", message, incident=incident.number)


def _close_given_up(run: Run, incident: Incident, reason: str) -> str:
    """Close the incident; the reason as the user reads it."""
    newest = checkpoints.newest(run.state_folders())
    kept = f"; {newest.name} is kept, and a new start resumes from it" if newest else ""
    incident.close(run.folder, f"the run gave up: {reason}{kept}")
    cause, rank = incident.cause, incident.evidence.rank
    machine = f"Machine {run.folder.machine} ({socket.gethostname()}), rank {rank}." if run.several else ""
    parts = [f"{cause.title}.", machine, cause.explanation, cause.advice, f"Gave up: {reason}."]
    said = " ".join(filter(None, parts))
    # The last line of the log, where a launcher's own traceback has pushed the trainer's error out of sight.
    run.folder.mark_log(f"stopped: {said.splitlines()[0]}")
    return f"{said} See incidents/{incident.number}/report.md"


def complete(run: Run) -> str:
    """Make sure that the finished LoRA is in the run's folder and verifies: "" or what is wrong with it.

    A script with `save_dir` copies its files at its end; a script that was killed did not. The user's own script may
    write anything anywhere, so its own exit code is all there is.
    """
    if run.folder.foreign or not run.leads:
        return ""
    _fetch_lora(run)
    lora = run.folder.lora
    if lora is None:
        return f"the LoRA {run.folder.folder.name}.safetensors is missing"
    for attempt in range(VERIFY_TRIES_COUNT):
        if attempt:
            run.pause(1.0)
        result = checkpoints.verify_lora(lora, run.config.check.verify_s, run.remaining_s(), run.pause)
        if not result.error:
            return f"the LoRA {lora.name} is damaged: {'; '.join(result.problems)}" if result.problems else ""
    return f"the LoRA {lora.name} cannot be verified: {result.error}"


def _fetch_lora(run: Run) -> None:
    """Copy the LoRA from `save_dir` where the script did not; under a temporary name: it is never half there."""
    name = f"{run.folder.folder.name}.safetensors"
    source, target = Path(run.state.save_dir) / name, run.folder.folder / name
    if not run.state.save_dir or not source.is_file():
        return
    try:
        # Another one is of a shorter training of this run. Of two disks, no times are compared: their clocks may differ.
        if not target.is_file() or not filecmp.cmp(source, target, shallow=False):
            with writing_file(target) as temporary:
                shutil.copyfile(source, temporary)
    except OSError as error:
        run.folder.log(f"the LoRA stays in {source.parent}: it cannot be copied: {error}")


# ---- the start of an attempt ----


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
    if state.attempt and not checkpoint.exists(script := run.folder.folder / SCRIPT):
        gone = f"{script} is gone: the run's folder was moved or deleted. Move it back, then start the run again"
        print_line(gone)  # its log is elsewhere, too
        return Transition(State.FAILED, gone)
    for folder in folders if run.leads else ():  # in `save_dir`, another run may be writing at this moment
        checkpoint.sweep(folder, None if folder is folders[0] else folders[0].name)
    if (no_gpu := gpu_missing(run)) is not None:
        return no_gpu
    if missing := checkpoints.room_missing(folders):
        if state.attempt:
            return _try_again(run, missing, run.config.restart.disk_wait_s, EXIT_BUDGET)
        return Transition(State.FAILED, f"{missing}, then start the run again")
    unchecked = os.environ.pop(next_attempt.CHECKED, next_attempt.UNCHECKED).endswith(next_attempt.UNCHECKED)
    if unchecked and run.incident is None:  # said once: the training has none of it
        try:
            problems = next_attempt.start_problems(run.folder, run.config.check.render_s, run.pause)
        except MonitorError as error:
            problems = [str(error)]
        if problems:
            return Transition(State.FAILED, "; ".join(problems))

    if run.keeps_snapshots:
        state.snapshots, state.snapshots_off = checkpoints.memory_folder(run.folder.folder, state.snapshots)
    point = checkpoints.resume_point(run, folders)
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
        rendered = run.prewarm.render(number, point.path)
    except MonitorError as error:
        return Transition(State.FAILED, f"attempt {number} cannot be started: {error}")
    if not rendered.compatible:
        point, state.best_step = checkpoints.start_over(run, point), 0

    try:
        variables = checkpoints.memory_variables(run)
        standby = run.standby.release(rendered.script, point.path, variables)
        attempt = standby or _start_cold(run, number, rendered, point, variables)
    except OSError:
        state.current = None
        raise
    run.tries, state.best_step = 0, max(state.best_step, point.step)
    state.ledger.starts(point.step)
    state.attempt, state.changes_at_save, state.save_dir = number, [c["name"] for c in changes], rendered.save_dir
    state.resumed_step, state.current = point.step, attempt.record
    state.save(run.folder)
    if run.incident is not None:
        run.incident.resumed_from, run.incident.from_memory = point.step, point.record is not None
        run.incident.standby = standby is not None
        run.incident.save(run.folder)
    where = "a snapshot in memory" if point.record else point.path.name if point.path else ""
    source = f"from step {point.step} ({where})" if point.path else "from the start"
    how = ", which had been started early" if standby else ""
    more = {"changes": state.changes_at_save} if changes else {}
    kind, message = "restarted" if run.incident else "started", f"attempt {number} {source}, pid {attempt.pid}{how}"
    run.folder.event(kind, message, attempt=number, step=point.step, **more)
    start_tracker(run.folder)
    return attempt


def start_tracker(folder: RunFolder) -> None:
    """Start the process that logs the run to trackio, where it asks for that. Never raises: no tracker stops a run."""
    if folder.machine or folder.spec.get("trackers") != "trackio":
        return
    try:
        with open(folder.folder / "trackio.log", "ab") as log:
            helper(python("monitor.trackio_feed", str(folder.folder)), log)
    except OSError as error:
        folder.log(f"trackio could not be started: {error.strerror or error}; the run continues without it")


def _start_cold(
    run: Run, number: int, rendered: next_attempt.Rendered, point: ResumePoint, variables: dict[str, str]
) -> Attempt:
    """Start the script. OSError: it cannot be started, and nothing runs."""
    # Recorded before it starts: a monitor that is killed in between leaves a training that the next one can find.
    attempt = Attempt.prepare(run.folder, number)
    run.record(attempt)
    resume = {"HANGPROOF_RESUME": str(point.path)} if point.path else {}
    try:
        attempt.announce(rendered.script, point.path)
        attempt.start(rendered.script, run.folder.own / TRAINING_LOG, {**variables, **resume}, run.queue.handles())
    except OSError:
        attempt.close()
        raise
    return attempt


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


def _try_again(run: Run, message: str, limit_s: float, code: int | None = None) -> Transition:
    """A reason that may pass (no memory to fork, a full disk): wait longer each time, at most `limit_s`.

    code: the exit code after that.
    """
    now_s = time.monotonic()
    if not run.tries or run.wait_limit_s != limit_s:
        run.tries, run.tries_since_s, run.wait_limit_s = 0, now_s, limit_s
        run.folder.event("backoff", message)
    run.tries += 1
    if (waited_s := now_s - run.tries_since_s) >= limit_s:
        return Transition(State.FAILED, f"{message} (tried {run.tries} times in {duration(waited_s)})", code=code)
    return Transition(State.BACKOFF, message, now_s + min(FIRST_WAIT_S * 2 ** (run.tries - 1), LAST_WAIT_S))
