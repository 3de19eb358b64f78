"""The states of a run, one function each. Read `turn`: handle requests, then let the function of the state decide.

    opening → queued → starting → running ⇄ suspect ⇄ slow → recovering → backoff → starting …
    any of them → stopping → stopped | paused | preempted;   running → completed;   recovering → failed | unkillable

`STATES` names one function for every state; it returns the next one. What to do is decided by pure functions
(`detect/progress`, `diagnose/causes`, `state.History.after_failure`). The run that they watch is a `Loop` (`loop.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from guards.checkpoint import exists
from guards.heartbeat import REQUEST_TERM
from monitor import config, recovery
from monitor.attempt import Attempt, Unkillable, kill_leftovers, kill_processes
from monitor.detect.probe import Probe
from monitor.detect.progress import HUNG, OVER, SLOW, SUSPECT
from monitor.diagnose import causes
from monitor.ledger import amount
from monitor.loop import Loop
from monitor.phrases import PHASES, count
from monitor.process import platform, spawned
from monitor.process.platform import LOCK, Lock
from monitor.resume import checkpoints
from monitor.resume.next_attempt import CHECKED, START
from monitor.run_folder import AlreadyWatched, MonitorError, RunFolder, machine_number, print_line, wake_queue
from monitor.state import (
    EXIT_BUDGET,
    EXIT_DONE,
    FINAL,
    WATCHED,
    Observation,
    RunState,
    Shutdown,
    State,
    Transition,
    Verdict,
    nothing_left,
    spec_hash,
    store_learned,
)
from monitor.store import LeaseState, StoreAgent

NO_STEP_SAVE_S = 2.0  # a stop before the first step: there is nothing to save


def supervise(
    folder: Path, outputs: Path, echo: bool, parent_pid: int | None, restarted: bool, received: Sequence[int]
) -> int:
    """Watch the run in `folder` until its end; the exit code of `monitor run`.

    Args:
        outputs: the folder of all runs, with the queue that goes on afterwards.
        echo: show the log on standard error.
        parent_pid: the process that restarts this one when it is killed; `restarted`: it just did.
        received: signals that the parent received before this process could.

    Raises:
        MonitorError: another monitor watches the run, it was deleted, or the configuration or machine number is wrong.
    """
    began_s = time.time()
    if not exists(folder):  # the lock would make it again
        raise MonitorError(f"{folder}: the run was deleted while its monitor started")
    run_folder = RunFolder(folder, echo, machine_number(folder, os.environ))
    lock = Lock(run_folder.own / LOCK)
    try:
        if not lock.acquire(patience_s=2.0):
            already = f"another monitor watches this run; see `python -m monitor status {folder.name}`"
            raise AlreadyWatched(f"{folder}: {already}")
    except PermissionError as error:
        fix = "start the run as the account that owns its folder, or change the owner"
        raise MonitorError(f"{error.filename}: this account may not write there; {fix}") from error
    try:
        if done := nothing_left(folder):
            print_line(f"{folder.name}: {done}", sys.stdout)
            return EXIT_DONE
        parent = platform.process_info(parent_pid) if parent_pid else None
        keeper, saved = f"{parent.pid} {parent.start}" if parent else "", RunState.load(run_folder)
        ours = restarted and keeper and saved.keeper == keeper
        if ours and saved.state in FINAL and saved.state is not State.UNKILLABLE:
            return saved.code  # the monitor before this one saved it, and was killed afterwards
        if not restarted:
            run_folder.clear_stop_request(before_s=began_s)  # meant for a monitor of before
        loop = Loop(run_folder, turn, parent_pid)
        loop.state.keeper, loop.signals = keeper, list(received)
        loop.anew = not restarted and os.environ.get(CHECKED, "").startswith(START)
        return loop.run_until_final()
    except config.ConfigError as error:
        raise MonitorError(str(error)) from error
    finally:
        lock.release()
        wake_queue(outputs)


def turn(loop: Loop) -> Transition:
    """What the requests and the state ask for next."""
    try:
        return handle_requests(loop) or lease_lost(loop) or spent(loop) or STATES[loop.at.state](loop)
    except Unkillable as error:
        return loop.unkillable(str(error))


# ---- requests ----


def handle_requests(loop: Loop) -> Transition | None:
    """Act on signals and on a stop request. A SIGTERM takes the machine away; the user's stop is the user's decision.

    A user's stop stays a stop when SIGTERM follows: `resume-all` must not restart it. Only the first SIGTERM sets
    the time by which everything is gone.
    """
    numbers, request = list(loop.signals), loop.folder.stop_request()
    unknown = loop.at.state is State.OPENING and not loop.at.give_up_s
    if unknown or (not numbers and request is None):
        return None  # what an earlier monitor left must be known before it can be stopped
    shutdown = new = loop.state.shutdown
    if new is not None and new.ending == "changed":  # its restart gives way to an end
        new = None
    if signal.SIGTERM in numbers:
        new = new or Shutdown("preempted")
        if new.gone_by_s is None:
            new = replace(new, gone_by_s=time.monotonic() + loop.config.end.preempt_total_s)
    interrupted = any(number != signal.SIGTERM for number in numbers)
    if (request or {}).get("pause") is True and not interrupted:
        new = new or Shutdown("paused")  # an end that is under way goes on
    elif request is not None or interrupted:
        twice = shutdown is not None and shutdown.ending == "stopped"
        now = bool((request or {}).get("now")) or twice
        new = Shutdown("stopped", now, new.gone_by_s if new else None)
    known = new == shutdown and loop.at.state is State.STOPPING
    transition = None if new is None or known else shut_down(loop, new)
    del loop.signals[: len(numbers)]
    if request is not None:
        loop.folder.clear_stop_request()
    return transition


def shut_down(loop: Loop, shutdown: Shutdown) -> Transition:
    """Begin to stop: a checkpoint first when there is something to save."""
    end, now_s = loop.config.end, time.monotonic()
    loop.state.shutdown = shutdown
    if shutdown.ending != "changed":
        loop.standby.close()
    if loop.attempt is None:
        return after_stop(loop)
    if loop.at.state is State.RECOVERING:  # nothing is left to save: kill what is left
        return Transition(State.STOPPING, "stopping the recovery", now_s)
    wait_s = 0.0 if shutdown.now else end.stop_save_s
    if shutdown.gone_by_s is not None:
        wait_s = min(wait_s, end.preempt_save_s, max(0.0, shutdown.gone_by_s - now_s))
    stepped = any(b.count for b in loop.observe(loop.attempt).beats)
    loop.state.save(loop.folder)  # first: whatever becomes of this monitor, the next one knows which end was asked for
    if not loop.attempt.request_stop() or not stepped:
        wait_s = min(wait_s, NO_STEP_SAVE_S)
    preempted = shutdown.ending == "preempted"
    then = {"paused": "pausing", "changed": "restarting"}.get(shutdown.ending, "stopping")
    message = "the machine is needed: saving a checkpoint" if preempted else f"saving a checkpoint, then {then}"
    message = f"the spend limit is reached: {message}" if shutdown.ending == "spent" else message
    loop.folder.event("stopping", message)
    return Transition(State.STOPPING, message, now_s + wait_s)


def stopping(loop: Loop) -> Transition:
    """Wait for the checkpoint; a hang, the deadline or the end of the training ends the wait."""
    if loop.attempt is None:
        return after_stop(loop)
    view = loop.observe(loop.attempt)
    waits = not view.ended and time.monotonic() < loop.at.due_s
    if waits and judge(loop, view).kind not in (HUNG, SLOW, OVER):
        return loop.at
    end, hurried = loop.config.end, loop.remaining_s() < math.inf
    times_s = (end.preempt_grace_s, end.preempt_kill_s) if hurried else (end.stop_grace_s, end.kill_wait_s)
    killed = kill_processes(loop, loop.attempt, times_s)
    status = loop.attempt.exit_status(loop.observe(loop.attempt, fresh=True).beats)
    if status.done(loop.folder.foreign, killed=bool(killed.killed)) and not recovery.complete(loop):
        return completed(loop)
    return after_stop(loop)


def after_stop(loop: Loop) -> Transition:
    """The state after a stop or a preemption: the final one, with what is kept, or a restart with other changes."""
    shutdown = loop.state.shutdown or Shutdown("stopped")
    if shutdown.ending == "changed":
        if loop.attempt is not None:
            loop.attempt.close()
        loop.state.shutdown = loop.state.current = loop.attempt = None
        return Transition(State.BACKOFF, "restarting", time.monotonic())
    checkpoints.keep_newest(loop, loop.pause_at_end)
    newest = checkpoints.newest(loop.state_folders())
    where = f"step {loop.state.best_step}" + (f"; checkpoint: {newest.name}" if newest else ", without a checkpoint")
    if shutdown.ending == "spent":
        limit = over_limit(loop) or "the spend limit was reached"
        return Transition(State.FAILED, f"{limit}. Stopped at {where}", code=EXIT_BUDGET)
    return Transition(State(shutdown.ending), f"{shutdown.ending} at {where}")


# ---- starting ----


def opening(loop: Loop) -> Transition:
    """Continue what an earlier monitor left: a living training, a recovery, a stop; else prepare a start."""
    state, record = loop.state, loop.state.current
    attempt = Attempt.adopt(loop.folder, record) if record is not None else None
    living = attempt is not None and bool(attempt.tree.members)
    begun = attempt is not None and (attempt.pid is not None or attempt.exit_status(()).code is not None)
    if attempt is not None and not living and (loop.several or not begun):
        how = "ended with this machine's monitor; all machines start again" if begun else "had not begun yet"
        loop.folder.log(f"attempt {attempt.record.number} {how}")
        attempt.close()
        attempt, state.current, state.failing = None, None, False
    again = loop.several and state.state is State.PREEMPTED  # the group starts again, and its failures still count
    fresh = state.state in FINAL and not living and not again  # the user starts the run again
    if not fresh:
        recovery.load_incident(loop)
        over = state.shutdown is not None and (loop.anew or state.shutdown.ending == "preempted")
        if over and not (living and loop.several):
            # This machine is here, and a keeper repeats its signals. A training that was asked to save ends first.
            state.shutdown = Shutdown("changed") if attempt is not None and not state.failing else None
    kill_leftovers(loop, attempt if living else None)
    with contextlib.suppress(OSError):
        for text in spawned.orphans():
            loop.folder.log(text)
    if attempt is not None and not fresh:
        loop.attach(attempt)
        if loop.store is not None:
            loop.store.admitted = True  # it held the lease when this training began
        if living:
            message = f"adopted the running training (attempt {attempt.record.number}, pid {attempt.pid})"
            loop.folder.event("started", message)
        if state.shutdown is not None:
            return shut_down(loop, replace(state.shutdown, gone_by_s=None))
        if state.failing:
            return Transition(State.RECOVERING, "continuing the recovery")
        return Transition(State.RUNNING, "adopted after the monitor had been killed")
    if state.shutdown is not None and not fresh:
        return after_stop(loop)
    if fresh:
        state.renew(spec_hash(loop.folder.folder))
        kept = max(checkpoints.states(loop.state_folders()).values(), default=0)
        state.best_step = min(state.best_step, max(kept, 0))
    state.failing, state.shutdown, state.reason = False, None, None
    state.spec_hash = state.spec_hash or spec_hash(loop.folder.folder)
    state.started_at = state.started_at or platform.now().utc
    return Transition(State.QUEUED, "waiting for a free GPU" if loop.queue.devices else "preparing the start")


def queued(loop: Loop) -> Transition:
    """Wait for the GPU, and for the time of a restart; then start."""
    if loop.at.state is State.BACKOFF and time.monotonic() < loop.at.due_s:
        return loop.at
    if not loop.queue.acquire():
        return Transition(State.QUEUED, loop.queue.message)
    if (store := loop.store) is not None and not store.admitted and (wait := admission(loop, store)) is not None:
        return wait
    result = recovery.start_attempt(loop)
    if isinstance(result, Attempt):
        loop.attach(result)
        return Transition(State.STARTING, f"Starting from step {loop.state.resumed_step}")
    return result


# ---- the durable store ----


def admission(loop: Loop, store: StoreAgent) -> Transition | None:
    """Before the first attempt: wait until this run holds the lease and has what is newer in the store; then None."""
    view = store.poll()
    if view.ready:
        store.admitted = True
        if view.restored_step is not None:
            message = f"fetched step {view.restored_step} from the store, written by {view.restored_from}"
            loop.folder.event("restored", message, step=view.restored_step)
            if reason := loop.state.adopt_restored(loop.folder):
                return Transition(State.COMPLETED, reason)
        return None
    if view.lease is LeaseState.UNUSABLE:
        return Transition(State.FAILED, f"the store {store.address} cannot be used: {view.message}")
    if view.lease in (LeaseState.REFUSED, LeaseState.LOST):  # lost: before the first attempt, while it restored
        return Transition(State.FAILED, view.message, code=EXIT_BUDGET)
    if store.unreachable_s() >= loop.config.store.connect_s:
        reason = f"the store {store.address} cannot be reached ({view.error})"
        if not view.error:  # on a busy machine, the process has not asked it yet
            reason = f"the store's own process has not asked {store.address} yet; see monitor.log, or start fewer runs"
        waited = f"waited {loop.config.store.connect_s:.0f} s; start the run again once it answers"
        return Transition(State.FAILED, f"{reason}; {waited}", code=EXIT_BUDGET)
    return Transition(State.QUEUED, f"{view.message}: {view.error}" if view.error else view.message)


def spent(loop: Loop) -> Transition | None:
    """The run has cost what it may: stop it with a checkpoint."""
    busy = loop.at.state in (State.OPENING, State.STOPPING)
    return shut_down(loop, Shutdown("spent")) if not busy and over_limit(loop) else None


def over_limit(loop: Loop) -> str:
    """Why the run has cost what it may; "" while it has not."""
    limit = amount(loop.folder.spec.get("spend_limit"))
    return loop.state.ledger.over(limit, loop.config.end.stop_save_s)


def lease_lost(loop: Loop) -> Transition | None:
    """Another machine trains this run now: kill the training here and end, with that reason."""
    store = loop.store
    if store is None or not store.admitted:
        return None
    view = store.poll()
    if view.lease is not LeaseState.LOST or (loop.at.give_up_s and time.monotonic() < loop.at.due_s):
        return None
    if loop.attempt is not None:
        kill_processes(loop, loop.attempt)
    return Transition(State.FAILED, view.message, code=EXIT_BUDGET)


# ---- watching ----


def watching(loop: Loop) -> Transition:
    """One observation of a living attempt, and what follows from it."""
    attempt = loop.attempt
    if attempt is None:
        return Transition(State.OPENING)
    view = loop.observe(attempt)
    if view.ended:
        return script_ended(loop, attempt)
    verdict = judge(loop, view)
    if verdict.reset:
        loop.folder.log(f"timers reset: {verdict.reset}")
    if verdict.kind == OVER:
        return script_ended(loop, attempt)
    if (changes := loop.slowdown.poll(attempt, view, loop.watch, verdict)) is not None:
        loop.state.changes = changes
        return shut_down(loop, Shutdown("changed"))
    if verdict.kind == HUNG:
        return hung(loop, attempt, view, verdict)
    if verdict.kind == SUSPECT:
        return suspect(loop, attempt, view, verdict)
    return slow(loop, verdict) if verdict.kind == SLOW else progressing(loop, attempt, view, verdict)


def judge(loop: Loop, view: Observation) -> Verdict:
    """The verdict on this observation, with the probe's evidence where there is a suspicion."""
    if loop.probe is None:
        return loop.watch.observe(view)
    loop.probe.spy.poll()
    verdict = loop.watch.observe(replace(view, signals=loop.probe.signals))
    if loop.probe.due(verdict, view.now_s):
        signals = loop.probe.sample_again(view.beats, verdict.budget_s)
        verdict = loop.watch.observe(replace(view, signals=signals))
    if loop.trial and verdict.kind == HUNG and not verdict.evidence:
        return replace(verdict, kind=SUSPECT)  # a compiler may take its time
    return verdict


def progressing(loop: Loop, attempt: Attempt, view: Observation, verdict: Verdict) -> Transition:
    """Whatever was suspected is over."""
    if loop.at.state in (State.SUSPECT, State.SLOW):
        loop.folder.log(f"progress again: {PHASES[verdict.phase]}, step {verdict.step}")
        loop.calm_since_s, loop.slow_reason = view.now_s, ""
        loop.drop_probe()
    loop.prewarm.tick(view.now_s)
    if loop.queue.held:  # else an adopted training has the GPU's lock, and a standby could not inherit it
        loop.standby.tick(view, attempt)
    # On its way to the gate, it takes processor time from the training.
    loop.watch.disturbed = loop.standby.attempt is not None and not loop.standby.ready
    if (store := loop.store) is not None and store.holds and verdict.phase == "step":
        save_s = loop.watch.learned().get("save", {}).get("median", 0.0)
        store.request_save(view.step, loop.watch.step_s(), save_s)
    begins = loop.at.state is State.STARTING and not any(b.count for b in view.beats)
    if loop.at.state is State.STARTING and not begins:
        recovery.note_gpu(loop, view.beats)
    suspect_s = view.now_s + verdict.budget_s / 2 - verdict.stalled_s  # a turn is then, not a poll later
    return loop.at if begins else Transition(State.RUNNING, due_s=suspect_s)


def suspect(loop: Loop, attempt: Attempt, view: Observation, verdict: Verdict) -> Transition:
    """Half the limit without progress: gather evidence, touch nothing."""
    if loop.probe is None:
        # With stacks, which interrupts the training for a moment: not again soon after a suspicion that was wrong.
        full = view.now_s - loop.calm_since_s >= loop.config.watch.evidence_pause_s
        loop.probe = Probe(attempt.tree, attempt.heartbeats, loop.config, loop.gpus.read, view.beats, full)
        if full:
            message = f"no progress for {verdict.stalled_s:.1f} s (limit {verdict.budget_s:.1f} s)"
            loop.folder.event("suspect", f"{PHASES[verdict.phase]}: {message}", phase=verdict.phase, step=verdict.step)
    limit_s = view.now_s + verdict.budget_s - verdict.stalled_s  # the next turn is then, not a poll later
    return Transition(State.SUSPECT, f"no progress for {verdict.stalled_s:.0f} s", limit_s)


def slow(loop: Loop, verdict: Verdict) -> Transition:
    """Over the limit, but moving: say why, and leave it alone."""
    loop.slow_reason = "; ".join(verdict.evidence)
    if loop.at.state is not State.SLOW:
        phase = verdict.phase
        loop.folder.event("slow", f"{PHASES[phase]}: {loop.slow_reason}", phase=phase, step=verdict.step)
    return Transition(State.SLOW, loop.slow_reason)


# ---- the end of an attempt ----


def hung(loop: Loop, attempt: Attempt, view: Observation, verdict: Verdict) -> Transition:
    """Hung: collect the evidence."""
    if (probe := loop.probe) is None:
        probe = loop.probe = Probe(attempt.tree, attempt.heartbeats, loop.config, loop.gpus.read, view.beats, True)
    status, slow_reason = attempt.exit_status(view.beats), loop.slow_reason or loop.slowdown.text()
    found = recovery.evidence_of(loop, attempt, "hang")
    evidence = causes.of_hang(found, attempt, verdict, status, probe.texts(), slow_reason)
    evidence.missing += probe.missing
    return recovery.open_incident(loop, attempt, evidence, loop.watch.last_progress_s())


def script_ended(loop: Loop, attempt: Attempt) -> Transition:
    """The script has ended, or does nothing any more: completed, stopped, or a crash."""
    view = loop.observe(attempt, fresh=True)  # a rank may have begun, or reported its outcome, since
    if loop.errors_since is None:
        loop.watch.observe(replace(view, ranks_gone=False))  # learn from the last steps
    status = attempt.exit_status(view.beats)
    done = status.done(loop.folder.foreign, killed=False)
    # Saved and exited because a monitor asked, and not because something else sent it SIGTERM.
    if done or (status.outcome == "stopped" and not any(b.request == REQUEST_TERM for b in view.beats)):
        kill_processes(loop, attempt)
        problem = recovery.complete(loop) if done else ""
        if not done and loop.several:
            # Its ranks were asked on another machine. Only the first can be needed again: it knows if its user asked.
            reason = f"another machine ended the training at step {loop.state.best_step}, with a checkpoint"
            ending = State.PREEMPTED if loop.leads else State.STOPPED
            return Transition(ending, reason, code=None if loop.leads else EXIT_DONE)
        if not done:
            return Transition(State.STOPPED, f"stopped at step {loop.state.best_step} as requested")
        if not problem:
            return completed(loop, status.note)
        status = replace(status, outcome=causes.LORA_DAMAGED, note=problem)
    evidence = causes.of_crash(recovery.evidence_of(loop, attempt, "crash"), attempt, status)
    last_s = loop.watch.last_progress_s() if loop.watch.ranks else attempt.record.started_s
    return recovery.open_incident(loop, attempt, evidence, last_s)


def recovering(loop: Loop) -> Transition:
    """Answer the failure; again after an error, after the monitor was replaced, while a process survives."""
    if loop.attempt is None:
        return Transition(State.OPENING)
    if loop.view is None:  # adopted: it may have gone on by itself meanwhile
        loop.observe(loop.attempt)
    if loop.incident is None or not loop.state.failing:
        return Transition(State.RUNNING)
    result = recovery.recover(loop, loop.attempt, loop.incident)
    loop.drop_probe()
    if result.state is State.COMPLETED:
        return completed(loop)
    loop.state.durations, loop.attempt = loop.watch.learned(), None
    return result


def completed(loop: Loop, note: str = "") -> Transition:
    """The training is complete and its LoRA verifies. note: what it reported with its outcome, such as a tracker."""
    lora = loop.folder.lora
    if not loop.folder.foreign:
        try:
            store_learned(loop.folder, loop.watch.learned())
        except OSError as error:
            loop.folder.log(f"learned durations are not kept: {error}")
    # Of the attempt that made the LoRA: a smaller batch size can make a run of some epochs shorter.
    if reached := max(loop.view.step if loop.view else 0, loop.state.resumed_step):
        loop.state.best_step = reached
    made = (f"; LoRA: {lora.name}" if lora else "") + (f"; {note}" if note else "")
    reason = f"{count(loop.state.best_step, 'step')}, {count(loop.state.restarts, 'restart')}{made}"
    return Transition(State.COMPLETED, reason)


# A function for each state of a run that is not final.
STATES: dict[State, Callable[[Loop], Transition]] = {
    State.OPENING: opening,
    State.QUEUED: queued,
    **dict.fromkeys(WATCHED, watching),
    State.RECOVERING: recovering,
    State.BACKOFF: queued,
    State.STOPPING: stopping,
}
