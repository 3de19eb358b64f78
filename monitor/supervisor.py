"""The monitor's loop. Read `Supervisor.run_until_final` top to bottom: wait, handle requests, let the state's method decide.

    opening → queued → starting → running ⇄ suspect ⇄ slow → recovering → backoff → starting …
    any of them → stopping → stopped | paused | preempted;   running → completed;   recovering → failed | unkillable

`states` names one method for every state; it returns the next one. What to do is decided by pure functions
(`detect/progress`, `diagnose/causes`, `resume/policy`); what follows a failure is in `recovery.py`. An error that nobody
expected is logged with its traceback, reported once, and the loop goes on: whoever watches must not be the one that dies.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from guards import limits, step_requests
from monitor import config, recovery, start
from monitor.attempt import Attempt, AttemptView
from monitor.cli.notify import Notifier
from monitor.detect.probe import Probe
from monitor.detect.progress import HUNG, OVER, SLOW, SUSPECT, Observation, Signals, Verdict, Watch
from monitor.diagnose.collect import LORA_DAMAGED
from monitor.extra_saves import ExtraSaves
from monitor.gpu import nvml
from monitor.gpu.queue import GpuQueue
from monitor.phrases import PHASES, count
from monitor.process import platform, tree
from monitor.process.locks import LOCK, Lock
from monitor.process.platform import ProcessInfo
from monitor.resume import checkpoints, policy, script, snapshots
from monitor.run_folder import SCRIPT, MonitorError, RunFolder, machine_number, print_line, wake_queue
from monitor.slowdown import Slowdown
from monitor.spend import Spend
from monitor.standby import Standby
from monitor.start import EXIT_AGAIN, EXIT_BUDGET, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_STOPPED, Run
from monitor.state import (
    FINAL,
    WATCHED,
    RunState,
    Shutdown,
    State,
    learned_file,
    learned_key,
    load_learned,
    nothing_left,
    spec_hash,
    store_learned,
)
from monitor.status_writer import StatusWriter
from monitor.store import LeaseState, StoreAgent
from runs import staging

IDLE_POLL_S = 0.2  # between two steps of a run that has no living attempt
UNKILLABLE_POLL_S = 5.0
LAST_MESSAGE_S = 10.0  # for the notification that the run has ended
PERSIST_S = 10.0  # for the final state to be written to a disk that refuses
NO_STEP_SAVE_S = 2.0  # a stop before the first step: there is nothing to save
ERROR_PAUSE_S = 0.25


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
        raise MonitorError(f"{folder}: another monitor watches this run; see `python -m monitor status {folder.name}`")
    try:
        if done := nothing_left(folder):
            print(f"{folder.name}: {done}", flush=True)
            return EXIT_DONE
        if not restarted:
            run_folder.clear_stop_request(before_s=began_s)  # meant for a monitor of before
        return Supervisor(run_folder, checked, parent_pid, received).run_until_final()
    except (config.ConfigError, limits.LimitError) as error:
        raise MonitorError(str(error)) from error
    finally:
        lock.release()
        wake_queue()


@dataclass(frozen=True)
class Step:
    """The next state and a message for people. `due_s`: the state's wait is over then; `give_up_s`: processes that cannot
    be killed are waited for until then. Monotonic times, 0.0 for none."""

    state: State
    message: str = ""
    due_s: float = 0.0
    give_up_s: float = 0.0


def observation(view: AttemptView, signals: Signals) -> Observation:
    """What the decision sees of a view."""
    return Observation(
        now_s=view.moment.mono_s,
        boot_s=view.moment.boot_s,
        beats=tuple(view.beats),
        log_bytes=view.log_bytes,
        signals=signals,
        stopped=view.stopped,
        ranks_gone=view.ranks_gone,
        activity=view.activity,
        gone=view.dead,
    )


class Supervisor:
    """Watches one run until it reaches a final state."""

    def __init__(self, folder: RunFolder, checked: bool, parent_pid: int | None, received: Sequence[int]):
        text = ""
        with contextlib.suppress(OSError):
            text = (folder.folder / SCRIPT).read_text(encoding="utf-8", errors="replace")
        self.folder = folder
        self.config = config.load(environ={**os.environ, **limits.of_script(text)})
        self.waker = platform.Waker()
        self.signals = list(received)
        self.notifier = Notifier(folder.name, folder.log)
        if not folder.machine:
            folder.on_event = self.notifier.event
        verifier, gpus = checkpoints.Verifier(self.config.check.verify_s), nvml.Gpus()
        self.run = Run(
            folder=folder,
            config=self.config,
            state=RunState.load(folder),
            gpus=gpus,
            queue=GpuQueue(folder.name, folder.spec, gpus.listed),
            verifier=verifier,
            prewarm=script.Prewarm(folder, verifier, self.config.check.render_s),
            standby=Standby(folder, self.config.standby, self.config.end),
            pause=self.pause,
            report=self.report,
            store=StoreAgent(folder, self.config.store),
            checked=checked,
        )
        self.slowdown = Slowdown(self.run)
        self.status = StatusWriter(self.run, parent_pid, self.slowdown.summary)
        self.learned = {} if folder.foreign else load_learned(learned_file(), learned_key(folder.spec, nvml.model()))
        self.watch = Watch(self.config, {**self.learned, **self.run.state.durations})
        self.spend = Spend(folder.folder, folder.spec, self.config.end.stop_save_s)
        self.extra_saves = ExtraSaves(folder, self.config.store.extra_saves_count)
        self.at = Step(State.OPENING)
        self.code = EXIT_FAILED
        self.attempt: Attempt | None = None
        self.view: AttemptView | None = None
        self.probe: Probe | None = None
        self.slow_reason = ""  # why the current suspicion was judged slow
        self.calm_since_s = -math.inf  # when the last suspicion proved wrong
        self.last_step_s: float | None = None  # when the last new step was seen
        self.waiting_since_s: float | None = None  # a start that has to wait
        self.errors: dict[str, int] = {}  # unexpected ones, by their place
        self.failing_since: tuple[float, int] | None = None  # (time, step) since when every turn of the loop has failed
        self.states: dict[State, Callable[[], Step]] = {
            State.OPENING: self.opening,
            State.QUEUED: self.queued,
            **dict.fromkeys(WATCHED, self.watching),
            State.RECOVERING: self.recovering,
            State.BACKOFF: self.backing_off,
            State.STOPPING: self.stopping,
        }

    def run_until_final(self) -> int:
        """The loop; returns the exit code."""
        self.listen()
        try:
            while self.at.state not in FINAL:
                try:
                    self.write_status()
                    self.waker.sleep(self.poll_s())
                    platform.reap()
                    self.enter(
                        self.handle_requests() or self.lease_lost() or self.spent() or self.states[self.at.state]()
                    )
                    self.failing_since = None
                except start.Interrupted:
                    continue
                except Exception:  # noqa: BLE001 - the top of the loop: logged, and the next turn tries again
                    self.unexpected()
            return self.code
        finally:
            self.close()

    # ---- what every turn of the loop uses ----

    def listen(self) -> None:
        """Collect signals; the terminal's end does not end the run."""

        def received(number: int, _frame: object) -> None:
            self.signals.append(number)
            self.waker.wake()

        for name in ("SIGTERM", "SIGINT", "SIGBREAK"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), received)
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        platform.become_subreaper()

    def enter(self, step: Step) -> None:
        """Change the state. A recovery and a start save themselves what they commit, so here only an end is saved."""
        before, self.at = self.at.state, step
        if step.state is before:
            return
        state = self.run.state
        state.state = step.state
        state.durations, state.pace = self.watch.learned(), self.slowdown.known()
        if step.state in FINAL:
            try:  # shown before it is saved: after that, the keeper starts no monitor that could show the end
                self.write_status(force=True)
            finally:
                state.save(self.folder)
            return
        if step.state is State.STOPPING:
            state.save(self.folder)
        self.write_status(force=True)

    def report(self, state: State, message: str) -> None:
        """Show a state while a long step of it is under way."""
        if self.at.state is not state:
            self.enter(Step(state, message))

    def write_status(self, force: bool = False) -> bool:
        """status.json, once a second or when `force`."""
        self.notifier.poll()
        snapshots.touch(self.run.state.snapshots)
        return self.status.write(self.at.state, self.at.message, self.attempt, self.view, self.watch, force)

    def poll_s(self) -> float:
        """Seconds until the next turn."""
        if self.at.give_up_s:
            return UNKILLABLE_POLL_S
        if self.at.state in (State.RUNNING, State.SUSPECT, State.SLOW, State.STOPPING):
            left_s = self.at.due_s - time.monotonic() if self.at.state is State.SUSPECT else 0.0
            return min(self.watch.poll_s(), left_s + 0.005) if left_s > 0 else self.watch.poll_s()
        return 0.0 if self.at.state in (State.OPENING, State.RECOVERING) else IDLE_POLL_S

    def pause(self, seconds: float) -> None:
        """Wait for a subprocess; Interrupted when a signal or a stop request came."""
        self.waker.sleep(seconds)
        self.write_status()
        if self.at.state is not State.OPENING and (self.signals or self.folder.stop_request() is not None):
            raise start.Interrupted

    def pause_at_end(self, seconds: float) -> None:
        """Wait while the run ends: what must be done before is not interrupted."""
        self.waker.sleep(seconds)
        self.write_status()

    def unexpected(self) -> None:
        """An error that nobody expected: log the traceback, report it once, and give it a moment to pass.

        A monitor that fails at every turn sees no hang any more: after `fault_s` it stops the run with the reason, unless the
        training makes progress without it. A start that the operating system refuses has `start_s`.
        """
        refused = self.attempt is None and isinstance(sys.exc_info()[1], OSError)
        limit_s = self.config.restart.start_s if refused else self.config.watch.fault_s
        text = traceback.format_exc()
        place = "\n".join(text.strip().splitlines()[-3:])
        last = place.splitlines()[-1][:300]
        times = self.errors[place] = self.errors.get(place, 0) + 1
        with contextlib.suppress(OSError):
            if times == 1:
                self.folder.log(f"unexpected error in state {self.at.state}; the monitor continues\n{text}")
                self.folder.event("monitor_error", f"the monitor had an error and continues: {last}")
            elif times & (times - 1) == 0:  # 2, 4, 8, …
                self.folder.log(f"the same error, {times} times: {last}")
            self.drop_probe()  # evidence that an error cut short must not be compared
            if self.run.state.failure is not None and self.at.state in WATCHED:
                self.enter(Step(State.RECOVERING, self.at.message))
            now_s = time.monotonic()
            since_s, step = self.failing_since = self.failing_since or (now_s, self.run.state.best_step)
            if now_s - since_s >= limit_s:
                self.failing_since = None
                if self.attempt is None or self.observe(self.attempt, fresh=True).step <= step:
                    self.stop_at_fault(last)
        with contextlib.suppress(OSError):
            time.sleep(ERROR_PAUSE_S)

    def stop_at_fault(self, error: str) -> None:
        """The monitor itself is broken: stop the run with that reason; its checkpoints are kept."""
        end = self.config.end
        if self.attempt is not None:
            recovery.kill_processes(self.run, self.attempt, end.grace_s, end.kill_wait_s)
        reason = f"the monitor cannot watch this run: {error}; see monitor.log. Checkpoints are kept"
        self.enter(self.finish(State.FAILED, EXIT_FAILED, reason))

    def finish(self, state: State, code: int, reason: str) -> Step:
        """Reach a final state; the newest steps are on the disk, and what the store lacks is copied, before that."""
        self.run.standby.close()
        if state is not State.COMPLETED and (unkept := start.keep_newest(self.run, self.pause_at_end)):
            reason = f"{reason}; {unkept}"
        if missing := self.flush_store():
            reason = f"{reason}; {missing}"
        self.code, self.run.state.reason = code, reason
        self.folder.event(state.value, reason)
        return Step(state, reason)

    # ---- requests ----

    def handle_requests(self) -> Step | None:
        """Act on signals and on a stop request. A SIGTERM takes the machine away; the user's stop is the user's decision.

        A user's stop stays a stop when SIGTERM follows: `resume-all` must not restart it. Only the first SIGTERM sets the
        time by which everything is gone.
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
        step = None if new is None or known else self.shut_down(new)
        del self.signals[: len(numbers)]
        if request is not None:
            self.folder.clear_stop_request()
        return step

    def shut_down(self, shutdown: Shutdown) -> Step:
        """Begin to stop: a checkpoint first when there is something to save."""
        end, now_s = self.config.end, time.monotonic()
        self.run.state.shutdown = shutdown
        self.run.standby.close()
        if self.attempt is None:
            return self.left()
        if self.at.state is State.RECOVERING:  # nothing is left to save: kill what is left
            return Step(State.STOPPING, "stopping the recovery", now_s)
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
        return Step(State.STOPPING, message, now_s + wait_s)

    def stopping(self) -> Step:
        """Wait for the checkpoint; a hang, the deadline or the end of the training ends the wait."""
        if self.attempt is None:
            return self.left()
        view = self.observe(self.attempt)
        waits = not view.gone and time.monotonic() < self.at.due_s
        if waits and self.judge(view).kind not in (HUNG, SLOW, OVER):
            return self.at
        end, hurried = self.config.end, self.run.remaining_s() < math.inf
        grace_s, kill_s = (end.preempt_grace_s, end.preempt_kill_s) if hurried else (end.stop_grace_s, end.kill_wait_s)
        killed = recovery.kill_processes(self.run, self.attempt, grace_s, kill_s)
        if killed.survivors:
            return self.unkillable(killed.survivors)
        status = self.attempt.exit_status(self.observe(self.attempt, fresh=True).beats)
        if status.done(self.folder.foreign, killed=bool(killed.killed)) and not recovery.complete(self.run):
            return self.completed()
        return self.left()

    def left(self) -> Step:
        """Stopped or preempted, with what is kept."""
        shutdown = self.run.state.shutdown or Shutdown("stopped")
        if shutdown.ending == "changed":
            if self.attempt is not None:
                self.attempt.close()
            self.run.state.shutdown = self.run.state.current = self.attempt = None
            return Step(State.BACKOFF, "restarting with the changed run", time.monotonic())
        start.keep_newest(self.run, self.pause_at_end)
        newest = checkpoints.newest(self.run.state_folders())
        where = f"step {self.furthest()}" + (f"; checkpoint: {newest.name}" if newest else ", without a checkpoint")
        if self.run.state.failure is not None and self.run.incident is not None:
            ending = "stopped by its spend limit" if shutdown.ending == "spent" else shutdown.ending
            outcome = f"the run was {ending} before the restart"
            self.run.incident.close(self.folder, outcome, platform.now().utc)
        if shutdown.ending == "spent":
            limit = self.spend.reached() or "the spend limit was reached"
            return self.finish(State.FAILED, EXIT_BUDGET, f"{limit}. Stopped at {where}")
        by_user = {"stopped": State.STOPPED, "paused": State.PAUSED}.get(shutdown.ending)
        state, code = (by_user, EXIT_STOPPED) if by_user else (State.PREEMPTED, EXIT_PREEMPTED)
        return self.finish(state, code, f"{shutdown.ending} at {where}")

    def furthest(self) -> int:
        """The furthest step that is known."""
        return max(self.run.state.best_step, self.view.step if self.view else 0)

    # ---- starting ----

    def opening(self) -> Step:
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
            survivors = start.kill_leftovers(run)
            if survivors:
                return self.unkillable(survivors.processes)
            with contextlib.suppress(OSError):
                for text in tree.orphans():
                    self.folder.log(text)
        if attempt is not None and not fresh:
            self.attach(attempt)
            run.queue.ask(state.queued_at_s)  # the training's shell holds the GPU; later this monitor does
            if living:
                run.standby.kill_orphans(attempt)
                run.store.admitted = run.store.used  # it held the lease when this training began
                message = f"adopted the running training (attempt {attempt.record.number}, pid {attempt.pid})"
                self.folder.event("started", message)
            if state.shutdown is not None:
                return self.shut_down(replace(state.shutdown, gone_by_s=None))
            if state.failure is not None:
                return Step(State.RECOVERING, "continuing the recovery")
            return Step(State.RUNNING, "adopted after the monitor had been killed")
        if state.shutdown is not None and not fresh:
            return self.left()
        if fresh:
            state.renew(spec_hash(self.folder.folder, state.spec_hash))
        state.failure = state.shutdown = state.reason = None
        state.spec_hash = state.spec_hash or spec_hash(self.folder.folder)
        state.started_at = state.started_at or platform.now().utc
        if run.leads and not self.folder.foreign:
            with contextlib.suppress(OSError):  # made while the disk can be written, for the mitigation `save_local`
                staging.identity(self.folder.folder)
        run.queue.ask(state.queued_at_s)
        state.queued_at_s = run.queue.queued_at_s
        return Step(State.QUEUED, "waiting for a free GPU" if run.queue.devices else "preparing the start")

    def attach(self, attempt: Attempt) -> None:
        """Watch this attempt from now on."""
        self.drop_probe()
        self.attempt, self.view = attempt, None
        self.watch = Watch(self.config, {**self.learned, **self.run.state.durations, **self.watch.learned()})
        self.slow_reason, self.calm_since_s, self.last_step_s = "", -math.inf, None
        self.slowdown.attach()
        self.status.new_attempt()

    def queued(self) -> Step:
        """Wait for the GPU, then start."""
        if not self.run.queue.acquire():
            return Step(State.QUEUED, self.run.queue.message)
        if self.run.store.used and not self.run.store.admitted and (wait := self.admission()) is not None:
            return wait
        result = start.already_started(self.run) or start.start_attempt(self.run)
        if isinstance(result, Attempt):
            self.waiting_since_s = None
            self.attach(result)
            step = self.run.state.resumed_step
            return Step(State.STARTING, f"Starting from step {step}")
        if isinstance(result, start.Survivors):
            return self.unkillable(result.processes)
        if isinstance(result, start.GiveUp):
            state = State.PREEMPTED if result.code == EXIT_PREEMPTED else State.FAILED
            return self.finish(state, result.code, result.reason)
        now_s = time.monotonic()
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s
            self.folder.event("backoff", result.message)
        if now_s - self.waiting_since_s >= self.config.restart.disk_wait_s:
            return self.finish(State.FAILED, EXIT_BUDGET, result.message)
        return Step(State.BACKOFF, result.message, now_s + result.seconds)

    def backing_off(self) -> Step:
        """Wait before the restart."""
        return self.queued() if time.monotonic() >= self.at.due_s else self.at

    # ---- the durable store ----

    def admission(self) -> Step | None:
        """Before the first attempt: wait until this run holds the lease and has what is newer in the store; then None."""
        store, reason = self.run.store, ""
        view = store.poll()
        if view.ready:
            store.admitted = True
            if view.restored_step is not None:
                message = f"fetched step {view.restored_step} from the store, written by {view.restored_from}"
                self.folder.event("restored", message, step=view.restored_step)
                if reason := start.adopt_restored(self.run):
                    return self.finish(State.COMPLETED, EXIT_DONE, reason)
            return None
        if view.lease is LeaseState.UNUSABLE:
            return self.finish(State.FAILED, EXIT_FAILED, f"the store {store.address} cannot be used: {view.message}")
        if view.lease in (LeaseState.REFUSED, LeaseState.LOST):  # lost: before the first attempt, while it restored
            return self.finish(State.FAILED, EXIT_BUDGET, view.message)
        if store.unreachable_s() >= self.config.store.connect_s:
            reason = f"the store {store.address} cannot be reached ({view.error or 'no answer; see monitor.log'})"
            waited = f"waited {self.config.store.connect_s:.0f} s; start the run again once it answers"
            return self.finish(State.FAILED, EXIT_BUDGET, f"{reason}; {waited}")
        return Step(State.QUEUED, f"{view.message}: {view.error}" if view.error else view.message)

    def spent(self) -> Step | None:
        """The run has cost what it may: stop it with a checkpoint."""
        busy = self.at.state in (State.OPENING, State.STOPPING) or self.run.state.shutdown is not None
        if busy or not self.spend.reached():
            return None
        return self.shut_down(Shutdown("spent"))

    def lease_lost(self) -> Step | None:
        """Another machine trains this run now: kill the training here and end, with that reason."""
        store, state = self.run.store, self.run.state
        if not store.admitted or self.at.state in FINAL:
            return None
        view = store.poll()
        if view.lease is not LeaseState.LOST or (self.at.give_up_s and time.monotonic() < self.at.due_s):
            return None
        if self.attempt is not None:
            end = self.config.end
            killed = recovery.kill_processes(self.run, self.attempt, end.grace_s, end.kill_wait_s)
            if killed.survivors:
                return self.unkillable(killed.survivors)
        if self.run.incident is not None and state.failure is not None:
            outcome = "the run ended here, because another machine trains it"
            self.run.incident.close(self.folder, outcome, platform.now().utc)
        return self.finish(State.FAILED, EXIT_BUDGET, view.message)

    def flush_store(self) -> str:
        """Copy to the store what is not there yet, within a limit; "" or what is missing there.

        A second stop ends the wait at once, a SIGTERM shortens it to the notice of a pre-emption.
        """
        store, limits, now_s = self.run.store, self.config.store, time.monotonic()
        if not store.holds:
            return ""
        shutdown = self.run.state.shutdown
        until_s = now_s if shutdown is not None and shutdown.now else now_s + limits.flush_s
        self.report(State.STOPPING, "copying the last files to the store")

        def limit_s() -> float:
            nonlocal until_s
            numbers = list(self.signals)
            del self.signals[: len(numbers)]
            if signal.SIGTERM in numbers:
                until_s = min(until_s, time.monotonic() + self.config.end.preempt_total_s)
            if self.folder.stop_request() is not None or any(number != signal.SIGTERM for number in numbers):
                self.folder.clear_stop_request()
                until_s = 0.0
            return min(until_s - time.monotonic(), self.run.remaining_s() - limits.release_s)

        return store.flush(limit_s, self.pause_at_end)

    # ---- watching ----

    def watching(self) -> Step:
        """One observation of a living attempt, and what follows from it."""
        attempt = self.attempt
        if attempt is None:
            return Step(State.OPENING)
        view = self.observe(attempt)
        if view.gone:
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

    def observe(self, attempt: Attempt, fresh: bool = False) -> AttemptView:
        """Poll the attempt; new steps close the incident and give the allowance of restarts back."""
        view = self.view = attempt.poll(platform.now(), self.config.watch.tree_s, fresh)
        self.status.note_phase(view.beats)
        state = self.run.state
        state.planned = max([state.planned, *(b.planned for b in view.beats)])
        if view.step <= state.best_step:
            return view
        first_new, state.best_step = state.best_step + 1, view.step
        before, self.last_step_s = self.last_step_s, view.moment.mono_s
        gap_s = self.last_step_s - before if before is not None else 0.0
        state.history, refunded = policy.after_progress(state.history, gap_s, self.config.restart)
        if refunded:
            self.folder.log("ten minutes of new steps: all restarts are available again")
        recovery.close_incident(self.run, view, first_new)
        return view

    def judge(self, view: AttemptView) -> Verdict:
        """The verdict on this observation, with the probe's evidence where there is a suspicion."""
        if self.probe is None:
            return self.watch.observe(observation(view, Signals()))
        self.probe.poll()
        self.run.verifier.poll()
        verdict = self.watch.observe(observation(view, self.probe.signals))
        if self.probe.due(verdict, view.moment.mono_s):
            signals = self.probe.sample_again(view.beats, verdict.budget_s)
            verdict = self.watch.observe(observation(view, signals))
        return verdict

    def progressing(self, view: AttemptView, verdict: Verdict) -> Step:
        """Whatever was suspected is over."""
        if self.at.state in (State.SUSPECT, State.SLOW):
            self.folder.log(f"progress again: {PHASES[verdict.phase]}, step {verdict.step}")
            self.calm_since_s, self.slow_reason = view.moment.mono_s, ""
            self.drop_probe()
        if not self.run.several:
            self.run.prewarm.tick(view.moment.mono_s, self.run.state_folders(), self.run.state.changes)
        if self.attempt is not None:
            text = self.run.prewarm.text(self.run.state.changes)
            self.run.standby.tick(view, self.attempt, text, self.run.queue.handles())
            self.watch.disturbed = self.run.standby.imports
        if (store := self.run.store).holds and verdict.phase == "step":
            save_s = self.watch.learned().get("save", {}).get("median", 0.0)
            self.extra_saves.tick(view.step, "checkpoint" in store.view.pending, self.watch.step_s(), save_s)
        begins = self.at.state is State.STARTING and not any(b.count for b in view.beats)
        if self.at.state is State.STARTING and not begins:
            start.note_gpu(self.run, view.beats)
        return self.at if begins else Step(State.RUNNING)

    def start_probe(self, attempt: Attempt, view: AttemptView, full: bool) -> Probe:
        """Gather evidence; `full`: with stacks, which interrupts the training for a moment."""
        probe = Probe(attempt.tree, attempt.heartbeats, self.config, self.run.gpus.read)
        probe.begin(view.beats, full)
        self.probe = probe
        return probe

    def suspect(self, attempt: Attempt, view: AttemptView, verdict: Verdict) -> Step:
        """Half the limit without progress: gather evidence, touch nothing."""
        if self.probe is None:
            recent = view.moment.mono_s - self.calm_since_s < self.config.watch.evidence_pause_s
            self.start_probe(attempt, view, full=not recent)
            if not recent:
                newest = checkpoints.newest(self.run.state_folders())
                if newest is not None:
                    self.run.verifier.begin(newest)
                limit = f"no progress for {verdict.stalled_s:.1f} s (limit {verdict.budget_s:.1f} s)"
                message = f"{PHASES[verdict.phase]}: {limit}"
                self.folder.event("suspect", message, phase=verdict.phase, step=verdict.step)
        limit_s = view.moment.mono_s + verdict.budget_s - verdict.stalled_s  # the next turn is then, not a poll later
        return Step(State.SUSPECT, f"no progress for {verdict.stalled_s:.0f} s", limit_s)

    def slow(self, verdict: Verdict) -> Step:
        """Over the limit, but moving: say why, and leave it alone."""
        self.slow_reason = "; ".join(verdict.evidence)
        if self.at.state is not State.SLOW:
            message = f"{PHASES[verdict.phase]}: {self.slow_reason}"
            self.folder.event("slow", message, phase=verdict.phase, step=verdict.step)
        return Step(State.SLOW, self.slow_reason)

    def drop_probe(self) -> None:
        if self.probe is not None:
            self.probe.close()
            self.probe = None

    # ---- the end of an attempt ----

    def hung(self, attempt: Attempt, view: AttemptView, verdict: Verdict) -> Step:
        """Hung: recover."""
        probe = self.probe or self.start_probe(attempt, view, full=True)
        last_s = self.watch.last_progress_s()
        slow_reason = self.slow_reason or self.slowdown.text()
        found = recovery.Hang(verdict, probe.texts(), list(probe.missing), slow_reason, last_s)
        return self.recover(attempt, view, found)

    def script_ended(self, attempt: Attempt) -> Step:
        """The script has ended, or does nothing any more: completed, stopped, or a crash."""
        view = self.observe(attempt, fresh=True)  # a rank may have begun, or reported its outcome, since
        if self.failing_since is None:
            self.watch.observe(replace(observation(view, Signals()), ranks_gone=False))  # learn from the last steps
        status = attempt.exit_status(view.beats)
        done = status.done(self.folder.foreign, killed=False)
        if done or recovery.stopped_on_request(status, view):
            end = self.config.end
            killed = recovery.kill_processes(self.run, attempt, end.grace_s, end.kill_wait_s)
            if killed.survivors:
                return self.unkillable(killed.survivors)
            problem = recovery.complete(self.run) if done else ""
            if not done and self.run.several:
                return self.stopped_elsewhere()
            if not done:
                return self.finish(State.STOPPED, EXIT_STOPPED, f"stopped at step {self.furthest()} as requested")
            if not problem:
                return self.completed(status.note)
            status = replace(status, outcome=LORA_DAMAGED, note=problem)
        last_s = self.watch.last_progress_s() if self.watch.ranks else attempt.record.started_s
        return self.recover(attempt, view, recovery.Crash(status, last_s))

    def recovering(self) -> Step:
        """Continue a recovery: after an error in its middle, after the monitor was replaced, while a process survives."""
        if self.attempt is None:
            return Step(State.OPENING)
        if self.run.state.failure is None:  # an error came before the failure was recorded: judge the run again
            return Step(State.RUNNING)
        return self.recover(self.attempt, self.observe(self.attempt), None)

    def recover(self, attempt: Attempt, view: AttemptView, failure: recovery.Hang | recovery.Crash | None) -> Step:
        """Hand the failure to `recovery.recover` and turn its result into a state."""
        result = recovery.recover(self.run, attempt, view, failure)
        if isinstance(result, start.Survivors):
            return self.unkillable(result.processes)
        self.drop_probe()
        if isinstance(result, recovery.Finished):
            return self.completed() if result.complete else self.left()
        self.run.state.durations, self.attempt = self.watch.learned(), None
        if isinstance(result, start.GiveUp):
            return self.finish(State.FAILED, result.code, result.reason)
        if self.run.several:
            return self.finish(State.PREEMPTED, EXIT_AGAIN, f"{result.message} with all machines")
        if result.wait_s:
            return Step(State.BACKOFF, result.message, time.monotonic() + result.wait_s)
        self.enter(Step(State.BACKOFF, result.message))
        return self.queued()

    def stopped_elsewhere(self) -> Step:
        """Of several machines: the ranks were asked on another machine to save and stop; here only the first one can be needed
        again, because it alone knows whether that was its user."""
        reason = f"another machine ended the training at step {self.furthest()}, with a checkpoint"
        if self.run.leads:
            return self.finish(State.PREEMPTED, EXIT_PREEMPTED, reason)
        return self.finish(State.STOPPED, EXIT_DONE, reason)

    def unkillable(self, survivors: tuple[ProcessInfo, ...]) -> Step:
        """Processes in uninterruptible sleep: wait for them, start no second writer."""
        now_s, waiting = time.monotonic(), self.at.state
        names = ", ".join(f"{p.name} ({p.pid})" for p in survivors)
        message = f"cannot be killed: {names}; nothing else is started while it lives"
        if self.run.remaining_s() < math.inf:  # the next start looks for them first
            return self.finish(State.PREEMPTED, EXIT_PREEMPTED, f"preempted; {message}")
        if self.at.give_up_s and now_s >= self.at.give_up_s:
            return self.finish(State.UNKILLABLE, EXIT_FAILED, message)
        if not self.at.give_up_s:
            self.folder.event("crash", message)
        if waiting in WATCHED and self.run.state.failure is not None:
            waiting = State.RECOVERING
        return Step(waiting, message, now_s, self.at.give_up_s or now_s + self.config.end.unkillable_s)

    def completed(self, note: str = "") -> Step:
        """The training is complete and its LoRA verifies. note: what it reported with its outcome, such as a tracker."""
        run, lora = self.run, self.folder.lora
        if not self.folder.foreign:
            try:
                store_learned(learned_file(), learned_key(self.folder.spec, nvml.model()), self.watch.learned())
            except OSError as error:
                self.folder.log(f"learned durations are not kept: {error}")
        if run.incident is not None:
            outcome = run.incident.outcome if run.state.failure else "the run completed"
            run.incident.close(self.folder, outcome, platform.now().utc)
        run.state.failure = None
        made = (f"; LoRA: {lora.name}" if lora else "") + (f"; {note}" if note else "")
        reason = f"{count(self.furthest(), 'step')}, {count(run.state.restarts, 'restart')}{made}"
        return self.finish(State.COMPLETED, EXIT_DONE, reason)

    def report_ledger(self) -> None:
        """Where the run's time went, in one line: an event, and on standard output."""
        from monitor import ledger  # of no use before the end

        line = ledger.read(self.folder.own).line()
        self.folder.event("ledger", line)
        print_line(f"{self.folder.name}: {line}", sys.stdout)

    def close(self) -> None:
        """Release everything, each whatever happens to the others. The lock is released last, by its owner.

        An error must not leave here: the run has reached its final state, and must not be started again.
        """
        until_s, state, run = time.monotonic() + PERSIST_S, self.run.state, self.run
        last_message_s = min(LAST_MESSAGE_S, run.remaining_s())
        try:
            run.store.close(min(self.config.store.release_s, run.remaining_s()) if self.at.state in FINAL else 0.0)
            with contextlib.ExitStack() as stack:
                final = self.at.state in FINAL and self.at.state is not State.UNKILLABLE
                for release in (run.queue.release, run.gpus.close, run.prewarm.close, run.standby.close,
                                run.verifier.cancel, self.drop_probe):  # fmt: skip
                    stack.callback(release)
                if final and self.attempt is not None:
                    stack.callback(self.attempt.close)
                if final and not run.unkept:
                    stack.callback(snapshots.drop, state.snapshots)
                    state.snapshots = ""
                if final:
                    state.current = state.failure = state.shutdown = None
                    for kind in step_requests.waiting(self.folder.folder) if run.leads else ():
                        step_requests.refuse(self.folder.folder, kind, state.best_step, f"the run is {self.at.state}")
                self.notifier.poll(last_message_s)
                while not (state.save(self.folder) and self.write_status(force=True)) and time.monotonic() < until_s:
                    time.sleep(ERROR_PAUSE_S)
            if final:
                self.report_ledger()
                self.notifier.poll(last_message_s)
                if (
                    run.leads
                    and self.at.state is not State.PREEMPTED
                    and (kept := staging.drop_copied(self.folder.folder))
                ):
                    self.folder.log(kept)
        except Exception:  # noqa: BLE001 - the end of the process
            self.folder.log(f"error while closing\n{traceback.format_exc()}")
