"""The loop that watches one run: what every turn uses, its errors, and how a run ends. A turn is `supervisor.turn`.

Read `Loop.run_until_final`: write the status, sleep, take a turn. An error that nobody expected is logged with its
traceback, reported once, and the loop goes on: whoever watches must not be the one that dies.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from guards import step_requests
from monitor import config, recovery
from monitor.attempt import Attempt, Unkillable, kill_processes
from monitor.detect.probe import Probe
from monitor.detect.progress import Watch
from monitor.diagnose.causes import Evidence
from monitor.diagnose.slow import Slowdown
from monitor.ledger import Ledger, amount
from monitor.process import platform
from monitor.recovery import Interrupted, Run
from monitor.resume import checkpoints
from monitor.run_folder import STATUS, RunFolder, print_line, read_json
from monitor.state import EXIT_CODES, EXIT_FAILED, FINAL, WATCHED, Observation, State, Transition, load_learned
from monitor.status_writer import Notifier, StatusWriter
from runs.staging import drop_copied

IDLE_POLL_S = 0.2  # between two steps of a run that has no living attempt
UNKILLABLE_POLL_S = 5.0
LAST_MESSAGE_S = 10.0  # for the notification that the run has ended
PERSIST_S = 10.0  # for the final state to be written to a disk that refuses
ERROR_PAUSE_S = 0.25


class Loop(Run):
    """One run until it reaches a final state.

    `trial`: its attempt is only tried (launch/rehearse.py). A failure ends it, nothing hangs without evidence, signals end
    the process, and nobody is notified. `evidence`: of its failure. `on_view`: called with each observation.
    """

    def __init__(
        self,
        folder: RunFolder,
        turn: Callable[[Loop], Transition],
        parent_pid: int | None = None,
        received: Sequence[int] = (),
        trial: bool = False,
    ):
        super().__init__(folder, config.load())
        self.turn, self.trial = turn, trial
        self.evidence: Evidence | None = None
        self.on_view: Callable[[Attempt, Observation], None] = lambda attempt, view: None
        self.about: dict[str, Any] = {}  # what the training process says of itself
        self.waker = platform.Waker()
        self.signals = list(received)
        self.notifier = Notifier(folder.name, folder.log)
        if not folder.machine and not trial:
            folder.on_event = self.notifier.event
        self.slowdown = Slowdown(self)
        self.status = StatusWriter(self, parent_pid)
        self.learned = {} if folder.foreign else load_learned(folder.folder, folder.spec)
        shown = Ledger.of(read_json(folder.own / STATUS))  # of each second; monitor.json is saved when much changes
        self.state.ledger = max(self.state.ledger, shown, key=lambda one: one.wall_s)
        self.state.ledger.price_per_hour = amount(folder.spec.get("price_per_hour"))
        self.state.ledger.follows()
        self.code = EXIT_FAILED
        self.probe: Probe | None = None
        self.slow_reason = ""  # why the current suspicion was judged slow
        self.calm_since_s = -math.inf  # when the last suspicion proved wrong
        self.last_step_s: float | None = None  # when the last new step was seen
        self.errors: dict[str, int] = {}  # unexpected ones, by their place
        self.failing_since: tuple[float, int] | None = None  # (time, step) since when every turn of the loop has failed

    def run_until_final(self) -> int:
        """The loop; returns the exit code."""
        self.listen()
        try:
            while self.at.state not in FINAL:
                try:
                    self.write_status()
                    self.waker.sleep(self.poll_s())
                    platform.reap()
                    self.enter(self.turn(self))
                    self.failing_since = None
                except Interrupted:
                    continue
                except Exception:  # noqa: BLE001 - the top of the loop: logged, and the next turn tries again
                    self.unexpected()
            return self.code
        finally:
            self.close()

    def listen(self) -> None:
        """Collect signals; the terminal's end does not end the run."""
        platform.become_subreaper()
        if self.trial:
            return

        def received(number: int, _frame: object) -> None:
            self.signals.append(number)
            self.waker.wake()

        for name in ("SIGTERM", "SIGINT", "SIGBREAK"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), received)
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def enter(self, new: Transition) -> None:
        """Change the state. A recovery and a start save themselves what they commit, so here only an end is saved."""
        if new.state in FINAL:
            new = self.finish(new)
        before, self.at = self.at.state, new
        if new.state is before:
            return
        state = self.state
        state.state = new.state
        state.durations, state.pace = self.watch.learned(), self.slowdown.known()
        if new.state in FINAL:
            state.ledger.ends(new.state is State.PREEMPTED, new.state is State.COMPLETED)
            try:  # shown before it is saved: after that, the keeper starts no monitor that could show the end
                self.write_status(force=True)
            finally:
                state.save(self.folder)
            return
        if new.state is State.STOPPING:
            state.save(self.folder)
        self.write_status(force=True)

    def report(self, state: State, message: str) -> None:
        """Show a state while a long step of it is under way."""
        if self.at.state is not state:
            self.enter(Transition(state, message))

    def write_status(self, force: bool = False) -> bool:
        """status.json, once a second or when `force`."""
        self.notifier.poll()
        checkpoints.touch_memory(self.state.snapshots)
        self.state.ledger.passes(self.activity())
        return self.status.write(force)

    def activity(self) -> str:
        """The state of the ledger that the time from now on belongs to."""
        at, known = self.at, self.state.ledger
        if at.state in (State.OPENING, State.STOPPING) or at.state in FINAL:
            return known.state
        if at.state is State.QUEUED or (at.state is State.BACKOFF and time.monotonic() < at.due_s):
            return "waiting"
        if at.state in WATCHED and self.status.steps:
            return "training"
        return "recovering" if known.pending else "loading"

    def poll_s(self) -> float:
        """Seconds until the next turn."""
        if self.at.give_up_s:
            return UNKILLABLE_POLL_S
        if self.at.state in (State.RUNNING, State.SUSPECT, State.SLOW, State.STOPPING):
            left_s = self.at.due_s - time.monotonic() if self.at.state is State.SUSPECT else 0.0
            return min(self.watch.poll_s(), left_s + 0.005) if left_s > 0 else self.watch.poll_s()
        if self.at.state is State.BACKOFF:
            return min(IDLE_POLL_S, max(0.0, self.at.due_s - time.monotonic()))
        return 0.0 if self.at.state in (State.OPENING, State.RECOVERING) else IDLE_POLL_S

    def pause(self, seconds: float) -> None:
        """Wait for a subprocess; Interrupted when a signal or a stop request came."""
        self.pause_at_end(seconds)
        if self.at.state is not State.OPENING and (self.signals or self.folder.stop_request() is not None):
            raise Interrupted

    def pause_at_end(self, seconds: float) -> None:
        """Wait while the run ends: what must be done before is not interrupted."""
        self.waker.sleep(seconds)
        self.write_status()

    def observe(self, attempt: Attempt, fresh: bool = False) -> Observation:
        """Poll the attempt; new steps close the incident and give the allowance of restarts back."""
        view = self.view = attempt.poll(platform.now(), self.config.watch.tree_s, fresh)
        self.on_view(attempt, view)
        self.status.note_phase(view.beats)
        if view.beats and view.beats[0].about != self.about and not self.trial:  # its script may have set limits
            self.about = view.beats[0].about
            config.enclose(self.config, self.about.get("environment"))
        state = self.state
        state.planned = max([state.planned, *(b.planned for b in view.beats)])
        state.ledger.reaches(view.step)
        if view.step <= state.best_step:
            return view
        first_new, state.best_step = state.best_step + 1, view.step
        before, self.last_step_s = self.last_step_s, view.now_s
        gap_s = self.last_step_s - before if before is not None else 0.0
        state.history, refunded = state.history.after_progress(gap_s, self.config.restart)
        if refunded:
            self.folder.log("ten minutes of new steps: all restarts are available again")
        recovery.close_incident(self, view, first_new)
        return view

    def attach(self, attempt: Attempt) -> None:
        """Watch this attempt from now on."""
        self.drop_probe()
        self.attempt, self.view = attempt, None
        self.watch = Watch(self.config, {**self.learned, **self.state.durations, **self.watch.learned()})
        self.slow_reason, self.calm_since_s, self.last_step_s = "", -math.inf, None
        self.slowdown.attach()
        self.status.new_attempt()

    def drop_probe(self) -> None:
        if self.probe is not None:
            self.probe.close()
            self.probe = None

    def unexpected(self) -> None:
        """An error that nobody expected: log the traceback, report it once, and give it a moment to pass.

        A monitor that fails at every turn sees no hang any more: after `fault_s` it stops the run with the reason,
        unless the training makes progress without it. A start that the operating system refuses has `start_s`.
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
            if self.state.failing and self.at.state in WATCHED:
                self.enter(Transition(State.RECOVERING, self.at.message))
            now_s = time.monotonic()
            since_s, step = self.failing_since = self.failing_since or (now_s, self.state.best_step)
            if now_s - since_s >= limit_s:
                self.failing_since = None
                if self.attempt is None or self.observe(self.attempt, fresh=True).step <= step:
                    self.stop_at_fault(last)
        with contextlib.suppress(OSError):
            time.sleep(ERROR_PAUSE_S)

    def stop_at_fault(self, error: str) -> None:
        """The monitor itself is broken: stop the run with that reason; its checkpoints are kept."""
        if self.attempt is not None:
            with contextlib.suppress(Unkillable):
                kill_processes(self, self.attempt)
        reason = f"the monitor cannot watch this run: {error}; see monitor.log. Checkpoints are kept"
        self.enter(Transition(State.FAILED, reason))

    # ---- the end of the run ----

    def unkillable(self, names: str) -> Transition:
        """Processes in uninterruptible sleep: wait for them, start no second writer."""
        now_s, waiting = time.monotonic(), self.at.state
        message = f"cannot be killed: {names}; nothing else is started while it lives"
        if self.remaining_s() < math.inf:  # the next start looks for them first
            return Transition(State.PREEMPTED, f"preempted; {message}")
        if self.at.give_up_s and now_s >= self.at.give_up_s:
            return Transition(State.UNKILLABLE, message)
        if not self.at.give_up_s:
            self.folder.event("crash", message)
        if waiting in WATCHED and self.state.failing:
            waiting = State.RECOVERING
        return Transition(waiting, message, now_s, self.at.give_up_s or now_s + self.config.end.unkillable_s)

    def finish(self, end: Transition) -> Transition:
        """Reach a final state; the newest steps are on the disk, and what the store lacks is copied, before that."""
        self.standby.close()
        reason = end.message
        if end.state is not State.COMPLETED and (unkept := checkpoints.keep_newest(self, self.pause_at_end)):
            reason = f"{reason}; {unkept}"
        if missing := self.flush_store():
            reason = f"{reason}; {missing}"
        completed, incident = end.state is State.COMPLETED, self.incident
        failing = self.state.failing and end.state is not State.UNKILLABLE
        if incident is not None and (completed or failing):
            ended = "the run completed" if completed else f"the run ended before the restart: {reason}"
            incident.close(self.folder, (failing and incident.outcome) or ended, platform.now().utc)
            self.state.failing = False
        self.code, self.state.reason = EXIT_CODES[end.state] if end.code is None else end.code, reason
        self.folder.event(end.state.value, reason, reached=self.view.step if self.view else 0)
        return replace(end, message=reason)

    def flush_store(self) -> str:
        """Copy to the store what is not there yet, within a limit; "" or what is missing there.

        A second stop ends the wait at once, a SIGTERM shortens it to the notice of a pre-emption.
        """
        store, limits, now_s = self.store, self.config.store, time.monotonic()
        if store is None or not store.holds:
            return ""
        shutdown = self.state.shutdown
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
            return min(until_s - time.monotonic(), self.remaining_s() - limits.release_s)

        return store.flush(limit_s, self.pause_at_end)

    def close(self) -> None:
        """Release everything, each whatever happens to the others. The lock is released last, by its owner.

        An error must not leave here: the run has reached its final state, and must not be started again.
        """
        until_s, state = time.monotonic() + PERSIST_S, self.state
        last_message_s = min(LAST_MESSAGE_S, self.remaining_s())
        try:
            if self.store is not None:
                limit_s = min(self.config.store.release_s, self.remaining_s())
                self.store.close(limit_s if self.at.state in FINAL else 0.0)
            with contextlib.ExitStack() as stack:
                final = self.at.state in FINAL and self.at.state is not State.UNKILLABLE
                stack.callback(self.queue.release)  # last of these: nothing of the run uses the GPU any more
                for part in (self.gpus, self.prewarm, self.standby):
                    stack.callback(part.close)
                stack.callback(self.drop_probe)
                if final and self.attempt is not None:
                    stack.callback(self.attempt.close)
                if final and not self.unkept:
                    stack.callback(checkpoints.drop_memory, state.snapshots)
                    state.snapshots = ""
                if final:
                    state.current, state.failing, state.shutdown = None, False, None
                    for kind, name in step_requests.FILES.items() if self.leads else ():
                        if (self.folder.folder / name).exists():
                            reason = f"the run is {self.at.state}"
                            step_requests.refuse(self.folder.folder, kind, state.best_step, reason)
                self.notifier.poll(last_message_s)
                while not (state.save(self.folder) and self.write_status(force=True)) and time.monotonic() < until_s:
                    time.sleep(ERROR_PAUSE_S)
            if final and not self.trial:
                line = self.state.ledger.line()
                self.folder.event("ledger", line)
                print_line(f"{self.folder.name}: {line}", sys.stdout)
                self.notifier.poll(last_message_s)
                local = state.save_dir and self.leads and self.at.state is not State.PREEMPTED
                if local and (kept := drop_copied(self.folder.folder)):
                    self.folder.log(kept)
        except Exception:  # noqa: BLE001 - the end of the process
            self.folder.log(f"error while closing\n{traceback.format_exc()}")
