"""The states of a run, one method each. Read `Supervisor.turn`: handle requests, then let the state's method decide.

    opening → queued → starting → running ⇄ suspect ⇄ slow → recovering → backoff → starting …
    any of them → stopping → stopped | paused | preempted;   running → completed;   recovering → failed | unkillable

`states` names one method for every state; it returns the next one. What to do is decided by pure functions
(`detect/progress`, `diagnose/causes`, `recovery.after_failure`); what every turn uses is in `loop.py`.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from guards import limits
from monitor import config, recovery, start
from monitor.attempt import Attempt
from monitor.detect.probe import Probe
from monitor.detect.progress import HUNG, OVER, SLOW, SUSPECT, Observation, Verdict
from monitor.diagnose import collect
from monitor.ledger import amount
from monitor.loop import Loop
from monitor.phrases import PHASES, count
from monitor.process import platform, tree
from monitor.process.locks import LOCK, Lock
from monitor.resume import checkpoints
from monitor.run_folder import AlreadyWatched, MonitorError, RunFolder, machine_number, wake_queue
from monitor.state import (
    EXIT_BUDGET,
    EXIT_CODES,
    EXIT_DONE,
    FINAL,
    WATCHED,
    RunState,
    Shutdown,
    State,
    Transition,
    nothing_left,
    spec_hash,
    store_learned,
)
from monitor.store import LeaseState
from runs import staging

NO_STEP_SAVE_S = 2.0  # a stop before the first step: there is nothing to save


def supervise(
    folder: Path, echo: bool, checked: bool, parent_pid: int | None, restarted: bool, received: Sequence[int]
) -> int:
    """Watch the run in `folder` until its end; the exit code of `monitor run`.

    Args:
        echo: show the log on standard error. checked: the caller has looked for what is missing.
        parent_pid: the process that restarts this one when it is killed; `restarted`: it just did.
        received: signals that the parent received before this process could.

    Raises:
        MonitorError: another monitor watches the run, the configuration is wrong, or which of several machines this is.
    """
    began_s = time.time()
    run_folder = RunFolder(folder, echo, machine_number(folder, os.environ))
    lock = Lock(run_folder.own / LOCK)
    if not lock.acquire(patience_s=2.0):
        raise AlreadyWatched(
            f"{folder}: another monitor watches this run; see `python -m monitor status {folder.name}`"
        )
    try:
        if done := nothing_left(folder):
            print(f"{folder.name}: {done}", flush=True)
            return EXIT_DONE
        parent = platform.process_info(parent_pid) if parent_pid else None
        keeper, saved = f"{parent.pid} {parent.start}" if parent else "", RunState.load(run_folder)
        ours = restarted and keeper and saved.keeper == keeper
        if ours and saved.state in FINAL and saved.state is not State.UNKILLABLE:
            return EXIT_CODES[saved.state]  # the monitor before this one saved it, and was killed afterwards
        if not restarted:
            run_folder.clear_stop_request(before_s=began_s)  # meant for a monitor of before
        supervisor = Supervisor(run_folder, checked, parent_pid, received)
        supervisor.run.state.keeper = keeper
        return supervisor.run_until_final()
    except (config.ConfigError, limits.LimitError) as error:
        raise MonitorError(str(error)) from error
    finally:
        lock.release()
        wake_queue()


class Supervisor(Loop):
    """Watches one run: a method for each of its states."""

    def __init__(self, folder: RunFolder, checked: bool, parent_pid: int | None, received: Sequence[int]):
        super().__init__(folder, checked, parent_pid, received)
        self.states: dict[State, Callable[[], Transition]] = {
            State.OPENING: self.opening,
            State.QUEUED: self.queued,
            **dict.fromkeys(WATCHED, self.watching),
            State.RECOVERING: self.recovering,
            State.BACKOFF: self.backing_off,
            State.STOPPING: self.stopping,
        }

    def turn(self) -> Transition:
        """What the requests and the state ask for next."""
        try:
            return self.handle_requests() or self.lease_lost() or self.spent() or self.states[self.at.state]()
        except start.Unkillable as error:
            return self.unkillable(str(error))

    # ---- requests ----

    def handle_requests(self) -> Transition | None:
        """Act on signals and on a stop request. A SIGTERM takes the machine away; the user's stop is the user's decision.

        A user's stop stays a stop when SIGTERM follows: `resume-all` must not restart it. Only the first SIGTERM sets
        the time by which everything is gone.
        """
        numbers, request = list(self.signals), self.folder.stop_request()
        unknown = self.at.state is State.OPENING and not self.at.give_up_s
        if unknown or (not numbers and request is None):
            return None  # what an earlier monitor left must be known before it can be stopped
        shutdown = new = self.run.state.shutdown
        if new is not None and new.ending == "changed":  # its restart gives way to an end
            new = None
        if signal.SIGTERM in numbers:
            new = new or Shutdown("preempted")
            if new.gone_by_s is None:
                new = replace(new, gone_by_s=time.monotonic() + self.config.end.preempt_total_s)
        interrupted = any(number != signal.SIGTERM for number in numbers)
        if (request or {}).get("pause") is True and not interrupted:
            new = new or Shutdown("paused")  # an end that is under way goes on
        elif request is not None or interrupted:
            twice = shutdown is not None and shutdown.ending == "stopped"
            now = bool((request or {}).get("now")) or twice
            new = Shutdown("stopped", now, new.gone_by_s if new else None)
        known = new == shutdown and self.at.state is State.STOPPING
        transition = None if new is None or known else self.shut_down(new)
        del self.signals[: len(numbers)]
        if request is not None:
            self.folder.clear_stop_request()
        return transition

    def shut_down(self, shutdown: Shutdown) -> Transition:
        """Begin to stop: a checkpoint first when there is something to save."""
        end, now_s = self.config.end, time.monotonic()
        self.run.state.shutdown = shutdown
        self.run.standby.close()
        if self.attempt is None:
            return self.left()
        if self.at.state is State.RECOVERING:  # nothing is left to save: kill what is left
            return Transition(State.STOPPING, "stopping the recovery", now_s)
        wait_s = 0.0 if shutdown.now else end.stop_save_s
        if shutdown.gone_by_s is not None:
            wait_s = min(wait_s, end.preempt_save_s, max(0.0, shutdown.gone_by_s - now_s))
        stepped = any(b.count for b in self.observe(self.attempt).beats)
        if not self.attempt.request_stop() or not stepped:
            wait_s = min(wait_s, NO_STEP_SAVE_S)
        preempted = shutdown.ending == "preempted"
        then = {"paused": "pausing", "changed": "restarting"}.get(shutdown.ending, "stopping")
        message = "the machine is needed: saving a checkpoint" if preempted else f"saving a checkpoint, then {then}"
        message = f"the spend limit is reached: {message}" if shutdown.ending == "spent" else message
        self.folder.event("stopping", message)
        return Transition(State.STOPPING, message, now_s + wait_s)

    def stopping(self) -> Transition:
        """Wait for the checkpoint; a hang, the deadline or the end of the training ends the wait."""
        if self.attempt is None:
            return self.left()
        view = self.observe(self.attempt)
        waits = not view.ended and time.monotonic() < self.at.due_s
        if waits and self.judge(view).kind not in (HUNG, SLOW, OVER):
            return self.at
        end, hurried = self.config.end, self.run.remaining_s() < math.inf
        grace_s, kill_s = (end.preempt_grace_s, end.preempt_kill_s) if hurried else (end.stop_grace_s, end.kill_wait_s)
        killed = recovery.kill_processes(self.run, self.attempt, grace_s, kill_s)
        status = self.attempt.exit_status(self.observe(self.attempt, fresh=True).beats)
        if status.done(self.folder.foreign, killed=bool(killed.killed)) and not recovery.complete(self.run):
            return self.completed()
        return self.left()

    def left(self) -> Transition:
        """Stopped or preempted, with what is kept."""
        shutdown = self.run.state.shutdown or Shutdown("stopped")
        if shutdown.ending == "changed":
            if self.attempt is not None:
                self.attempt.close()
            self.run.state.shutdown = self.run.state.current = self.attempt = None
            return Transition(State.BACKOFF, "restarting with the changed run", time.monotonic())
        start.keep_newest(self.run, self.pause_at_end)
        newest = checkpoints.newest(self.run.state_folders())
        where = f"step {self.furthest()}" + (f"; checkpoint: {newest.name}" if newest else ", without a checkpoint")
        if self.run.state.failure is not None and self.run.incident is not None:
            ending = "stopped by its spend limit" if shutdown.ending == "spent" else shutdown.ending
            outcome = f"the run was {ending} before the restart"
            self.run.incident.close(self.folder, outcome, platform.now().utc)
        if shutdown.ending == "spent":
            limit = self.over_limit() or "the spend limit was reached"
            return Transition(State.FAILED, f"{limit}. Stopped at {where}", code=EXIT_BUDGET)
        return Transition(State(shutdown.ending), f"{shutdown.ending} at {where}")

    # ---- starting ----

    def opening(self) -> Transition:
        """Continue what an earlier monitor left: a living training, a recovery, a stop; else prepare a start."""
        run, state, record = self.run, self.run.state, self.run.state.current
        attempt = Attempt.adopt(self.folder, record) if record is not None else None
        living = attempt is not None and bool(attempt.tree.members)
        if attempt is not None and run.several and not living:
            self.folder.log(
                f"attempt {attempt.record.number} ended with this machine's monitor; all machines start again"
            )
            attempt.close()
            attempt = state.current = state.failure = None
        again = run.several and state.state is State.PREEMPTED  # the group starts again, and its failures still count
        fresh = state.state in FINAL and not living and not again  # the user starts the run again
        if not fresh:
            recovery.load_incident(run)
        if not living:
            start.kill_leftovers(run)
            with contextlib.suppress(OSError):
                for text in tree.orphans():
                    self.folder.log(text)
        if attempt is not None and not fresh:
            self.attach(attempt)
            if living:
                start.kill_leftovers(run, attempt)
                run.store.admitted = run.store.used  # it held the lease when this training began
                message = f"adopted the running training (attempt {attempt.record.number}, pid {attempt.pid})"
                self.folder.event("started", message)
            if state.shutdown is not None:
                return self.shut_down(replace(state.shutdown, gone_by_s=None))
            if state.failure is not None:
                return Transition(State.RECOVERING, "continuing the recovery")
            return Transition(State.RUNNING, "adopted after the monitor had been killed")
        if state.shutdown is not None and not fresh:
            return self.left()
        if fresh:
            state.renew(spec_hash(self.folder.folder))
        state.failure = state.shutdown = state.reason = None
        state.spec_hash = state.spec_hash or spec_hash(self.folder.folder)
        state.started_at = state.started_at or platform.now().utc
        if run.leads and not self.folder.foreign:
            with contextlib.suppress(OSError):  # made while the disk can be written, for the mitigation `save_local`
                staging.identity(self.folder.folder)
        return Transition(State.QUEUED, "waiting for a free GPU" if run.queue.devices else "preparing the start")

    def queued(self) -> Transition:
        """Wait for the GPU, then start."""
        if not self.run.queue.acquire():
            return Transition(State.QUEUED, self.run.queue.message)
        if self.run.store.used and not self.run.store.admitted and (wait := self.admission()) is not None:
            return wait
        result = start.already_started(self.run) or start.start_attempt(self.run)
        if isinstance(result, Attempt):
            self.waiting_since_s = None
            self.attach(result)
            return Transition(State.STARTING, f"Starting from step {self.run.state.resumed_step}")
        if result.state in FINAL:
            return result
        now_s = time.monotonic()
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s
            self.folder.event("backoff", result.message)
        if now_s - self.waiting_since_s >= self.config.restart.disk_wait_s:
            return Transition(State.FAILED, result.message, code=EXIT_BUDGET)
        return result

    def backing_off(self) -> Transition:
        """Wait before the restart."""
        return self.queued() if time.monotonic() >= self.at.due_s else self.at

    # ---- the durable store ----

    def admission(self) -> Transition | None:
        """Before the first attempt: wait until this run holds the lease and has what is newer in the store; then None."""
        store, reason = self.run.store, ""
        view = store.poll()
        if view.ready:
            store.admitted = True
            if view.restored_step is not None:
                message = f"fetched step {view.restored_step} from the store, written by {view.restored_from}"
                self.folder.event("restored", message, step=view.restored_step)
                if reason := start.adopt_restored(self.run):
                    return Transition(State.COMPLETED, reason)
            return None
        if view.lease is LeaseState.UNUSABLE:
            return Transition(State.FAILED, f"the store {store.address} cannot be used: {view.message}")
        if view.lease in (LeaseState.REFUSED, LeaseState.LOST):  # lost: before the first attempt, while it restored
            return Transition(State.FAILED, view.message, code=EXIT_BUDGET)
        if store.unreachable_s() >= self.config.store.connect_s:
            reason = f"the store {store.address} cannot be reached ({view.error or 'no answer; see monitor.log'})"
            waited = f"waited {self.config.store.connect_s:.0f} s; start the run again once it answers"
            return Transition(State.FAILED, f"{reason}; {waited}", code=EXIT_BUDGET)
        return Transition(State.QUEUED, f"{view.message}: {view.error}" if view.error else view.message)

    def spent(self) -> Transition | None:
        """The run has cost what it may: stop it with a checkpoint."""
        busy = self.at.state in (State.OPENING, State.STOPPING) or self.run.state.shutdown is not None
        return self.shut_down(Shutdown("spent")) if not busy and self.over_limit() else None

    def over_limit(self) -> str:
        """Why the run has cost what it may; "" while it has not."""
        limit = amount(self.folder.spec.get("spend_limit"))
        return self.run.state.ledger.over(limit, self.config.end.stop_save_s)

    def lease_lost(self) -> Transition | None:
        """Another machine trains this run now: kill the training here and end, with that reason."""
        store, state = self.run.store, self.run.state
        if not store.admitted or self.at.state in FINAL:
            return None
        view = store.poll()
        if view.lease is not LeaseState.LOST or (self.at.give_up_s and time.monotonic() < self.at.due_s):
            return None
        if self.attempt is not None:
            end = self.config.end
            recovery.kill_processes(self.run, self.attempt, end.grace_s, end.kill_wait_s)
        if self.run.incident is not None and state.failure is not None:
            outcome = "the run ended here, because another machine trains it"
            self.run.incident.close(self.folder, outcome, platform.now().utc)
        return Transition(State.FAILED, view.message, code=EXIT_BUDGET)

    # ---- watching ----

    def watching(self) -> Transition:
        """One observation of a living attempt, and what follows from it."""
        attempt = self.attempt
        if attempt is None:
            return Transition(State.OPENING)
        view = self.observe(attempt)
        if view.ended:
            return self.script_ended(attempt)
        verdict = self.judge(view)
        if verdict.reset:
            self.folder.log(f"timers reset: {verdict.reset}")
        if verdict.kind == OVER:
            return self.script_ended(attempt)
        if (changes := self.slowdown.poll(attempt, view, self.watch, verdict)) is not None:
            self.run.state.changes = changes
            return self.shut_down(Shutdown("changed"))
        if verdict.kind == HUNG:
            return self.hung(attempt, view, verdict)
        if verdict.kind == SUSPECT:
            return self.suspect(attempt, view, verdict)
        return self.slow(verdict) if verdict.kind == SLOW else self.progressing(view, verdict)

    def judge(self, view: Observation) -> Verdict:
        """The verdict on this observation, with the probe's evidence where there is a suspicion."""
        if self.probe is None:
            return self.watch.observe(view)
        self.probe.poll()
        self.run.verifier.poll()
        verdict = self.watch.observe(replace(view, signals=self.probe.signals))
        if self.probe.due(verdict, view.now_s):
            signals = self.probe.sample_again(view.beats, verdict.budget_s)
            verdict = self.watch.observe(replace(view, signals=signals))
        return verdict

    def progressing(self, view: Observation, verdict: Verdict) -> Transition:
        """Whatever was suspected is over."""
        if self.at.state in (State.SUSPECT, State.SLOW):
            self.folder.log(f"progress again: {PHASES[verdict.phase]}, step {verdict.step}")
            self.calm_since_s, self.slow_reason = view.now_s, ""
            self.drop_probe()
        if not self.run.several:
            self.run.prewarm.tick(view.now_s, self.run.state_folders(), self.run.state.changes)
        if self.attempt is not None:
            text = self.run.prewarm.text(self.run.state.changes)
            self.run.standby.tick(view, self.attempt, text, self.run.queue.handles())
            # On its way to the gate, it takes processor time from the training.
            self.watch.disturbed = self.run.standby.summary()["state"] == "starting"
        if (store := self.run.store).holds and verdict.phase == "step":
            save_s = self.watch.learned().get("save", {}).get("median", 0.0)
            store.request_save(view.step, self.watch.step_s(), save_s)
        begins = self.at.state is State.STARTING and not any(b.count for b in view.beats)
        if self.at.state is State.STARTING and not begins:
            start.note_gpu(self.run, view.beats)
        return self.at if begins else Transition(State.RUNNING)

    def start_probe(self, attempt: Attempt, view: Observation, full: bool) -> Probe:
        """Gather evidence; `full`: with stacks, which interrupts the training for a moment."""
        probe = Probe(attempt.tree, attempt.heartbeats, self.config, self.run.gpus.read)
        probe.begin(view.beats, full)
        self.probe = probe
        return probe

    def suspect(self, attempt: Attempt, view: Observation, verdict: Verdict) -> Transition:
        """Half the limit without progress: gather evidence, touch nothing."""
        if self.probe is None:
            recent = view.now_s - self.calm_since_s < self.config.watch.evidence_pause_s
            self.start_probe(attempt, view, full=not recent)
            if not recent:
                newest = checkpoints.newest(self.run.state_folders())
                if newest is not None:
                    self.run.verifier.begin(newest)
                message = f"no progress for {verdict.stalled_s:.1f} s (limit {verdict.budget_s:.1f} s)"
                self.folder.event(
                    "suspect", f"{PHASES[verdict.phase]}: {message}", phase=verdict.phase, step=verdict.step
                )
        limit_s = view.now_s + verdict.budget_s - verdict.stalled_s  # the next turn is then, not a poll later
        return Transition(State.SUSPECT, f"no progress for {verdict.stalled_s:.0f} s", limit_s)

    def slow(self, verdict: Verdict) -> Transition:
        """Over the limit, but moving: say why, and leave it alone."""
        self.slow_reason = "; ".join(verdict.evidence)
        if self.at.state is not State.SLOW:
            phase = verdict.phase
            self.folder.event("slow", f"{PHASES[phase]}: {self.slow_reason}", phase=phase, step=verdict.step)
        return Transition(State.SLOW, self.slow_reason)

    # ---- the end of an attempt ----

    def hung(self, attempt: Attempt, view: Observation, verdict: Verdict) -> Transition:
        """Hung: recover."""
        probe = self.probe or self.start_probe(attempt, view, full=True)
        scope, status = recovery.scope(self.run, attempt, view), attempt.exit_status(view.beats)
        slow_reason = self.slow_reason or self.slowdown.text()
        evidence = collect.of_hang(scope, verdict, status, probe.texts(), slow_reason)
        evidence.missing += probe.missing
        return self.recover(attempt, evidence, self.watch.last_progress_s())

    def script_ended(self, attempt: Attempt) -> Transition:
        """The script has ended, or does nothing any more: completed, stopped, or a crash."""
        view = self.observe(attempt, fresh=True)  # a rank may have begun, or reported its outcome, since
        if self.failing_since is None:
            self.watch.observe(replace(view, ranks_gone=False))  # learn from the last steps
        status = attempt.exit_status(view.beats)
        done = status.done(self.folder.foreign, killed=False)
        if done or recovery.stopped_on_request(status, view):
            end = self.config.end
            recovery.kill_processes(self.run, attempt, end.grace_s, end.kill_wait_s)
            problem = recovery.complete(self.run) if done else ""
            if not done and self.run.several:
                return self.stopped_elsewhere()
            if not done:
                return Transition(State.STOPPED, f"stopped at step {self.furthest()} as requested")
            if not problem:
                return self.completed(status.note)
            status = replace(status, outcome=collect.LORA_DAMAGED, note=problem)
        evidence = collect.of_crash(recovery.scope(self.run, attempt, view), status)
        last_s = self.watch.last_progress_s() if self.watch.ranks else attempt.record.started_s
        return self.recover(attempt, evidence, last_s)

    def recovering(self) -> Transition:
        """Continue a recovery: after an error in its middle, after the monitor was replaced, while a process survives."""
        if self.attempt is None:
            return Transition(State.OPENING)
        if self.run.state.failure is None:  # an error came before the failure was recorded: judge the run again
            return Transition(State.RUNNING)
        self.observe(self.attempt)
        return self.recover(self.attempt, None)

    def recover(self, attempt: Attempt, evidence: collect.Evidence | None, progress_s: float = 0.0) -> Transition:
        """Hand the failure to `recovery.recover`, which says what follows."""
        result = recovery.recover(self.run, attempt, evidence, progress_s)
        self.drop_probe()
        if result.state is State.COMPLETED:
            return self.completed()
        if result.state is not State.STOPPING:
            self.run.state.durations, self.attempt = self.watch.learned(), None
        return result

    def stopped_elsewhere(self) -> Transition:
        """Of several machines: the ranks were asked on another machine to save and stop; here only the first one can be
        needed again, because it alone knows whether that was its user."""
        reason = f"another machine ended the training at step {self.furthest()}, with a checkpoint"
        if self.run.leads:
            return Transition(State.PREEMPTED, reason)
        return Transition(State.STOPPED, reason, code=EXIT_DONE)

    def completed(self, note: str = "") -> Transition:
        """The training is complete and its LoRA verifies. note: what it reported with its outcome, such as a tracker."""
        run, lora = self.run, self.folder.lora
        if not self.folder.foreign:
            try:
                store_learned(self.folder.spec, self.watch.learned())
            except OSError as error:
                self.folder.log(f"learned durations are not kept: {error}")
        if run.incident is not None:
            outcome = run.incident.outcome if run.state.failure else "the run completed"
            run.incident.close(self.folder, outcome, platform.now().utc)
        run.state.failure = None
        made = (f"; LoRA: {lora.name}" if lora else "") + (f"; {note}" if note else "")
        reason = f"{count(self.furthest(), 'step')}, {count(run.state.restarts, 'restart')}{made}"
        return Transition(State.COMPLETED, reason)
