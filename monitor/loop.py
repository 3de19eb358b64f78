"""The loop that watches one run: what every turn uses, its errors, and how a run ends. A turn is `supervisor.turn`.

Read `Loop.run_until_final`: write the status, sleep, take a turn. An error that nobody expected is logged with its
traceback, reported once, and the loop goes on: whoever watches must not be the one that dies.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from guards import step_requests
from guards.heartbeat import Beat
from monitor import config, gpu, recovery
from monitor.attempt import Attempt, Unkillable, kill_processes
from monitor.detect.probe import Missing, Probe, Sample, growths, processes
from monitor.detect.progress import Watch
from monitor.diagnose.incident import COMPLETED, RESTARTING
from monitor.diagnose.slow import Slowdown
from monitor.ledger import Ledger, amount
from monitor.process import platform
from monitor.process.platform import Moment
from monitor.recovery import Interrupted, Run
from monitor.resume import checkpoints
from monitor.run_folder import STATUS, Notifier, RunFolder, machines, print_line, read_json
from monitor.state import EXIT_CODES, FINAL, WATCHED, Observation, State, Transition, load_learned
from runs.staging import drop_copied

IDLE_POLL_S = 0.2  # between two steps of a run that has no living attempt
UNKILLABLE_POLL_S = 5.0
LAST_MESSAGE_S = 10.0  # for the notification that the run has ended
PERSIST_S = 10.0  # for the final state to be written to a disk that refuses
ERROR_PAUSE_S = 0.25
EVERY_S = 1.0  # between two writes of the status
CHECKPOINTS_S, GPU_S, MACHINE_S = 5.0, 30.0, 5.0  # between two looks, samples in metrics.jsonl, readings of the machine
GPU_KEYS = ("name", "utilization", "memory_used", "memory_total", "temperature", "power_w")
Turn = Callable[["Loop"], Transition]
ACTIVE = (*WATCHED, State.STOPPING)


class Loop(Run):
    """One run until it reaches a final state.

    `trial`: its attempt is only tried (launch/rehearse.py). Nothing hangs without evidence, signals end the process, and
    nobody is notified. `on_view`: called with each observation.
    """

    def __init__(self, folder: RunFolder, turn: Turn, parent_pid: int | None = None, trial: bool = False):
        super().__init__(folder, config.load())
        self.turn, self.trial = turn, trial
        self.anew = False  # a person has started it: a stop that an earlier monitor left half done is over
        self.on_view: Callable[[Attempt, Observation], None] = lambda attempt, view: None
        self.about: dict[str, Any] = {}  # what the training process says of itself
        self.waker = platform.Waker()
        self.signals: list[int] = []  # received, and not answered yet
        self.notifier = Notifier(folder.name, folder.log)
        if not folder.machine and not trial:
            folder.on_event = self.notifier.event
        self.slowdown = Slowdown(self)
        self.status = StatusWriter(self, parent_pid)
        self.learned = {} if folder.foreign else load_learned(folder.folder, folder.spec)
        shown = Ledger.of(read_json(folder.own / STATUS))  # of each second; monitor.json is saved when much changes
        self.state.ledger = max(self.state.ledger, shown, key=lambda one: one.wall_s)
        self.state.ledger.follows(amount(folder.spec.get("price_per_hour")))
        self.probe: Probe | None = None
        self.slow_reason = ""  # why the current suspicion was judged slow
        self.calm_since_s = -math.inf  # when the last suspicion proved wrong
        self.last_step_s: float | None = None  # when the last new step was seen
        self.errors: set[str] = set()  # the places of unexpected ones
        self.errors_since: tuple[float, int] | None = None  # (time, step) since when every turn of the loop has failed

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
                    self.errors_since = None
                except Interrupted:
                    continue
                except Exception:  # noqa: BLE001 - the top of the loop: logged, and the next turn tries again
                    self.unexpected()
            return self.state.code
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
            if new.state in (State.STOPPING, *FINAL):
                state.save(self.folder)

    def write_status(self, force: bool = False) -> bool:
        """status.json, once a second or when `force`; and the ledger, which an activity begins on time."""
        activity, ledger = self.activity(), self.state.ledger
        due = force or platform.now().mono_s - self.status.written_s >= EVERY_S
        if due or activity != ledger.state:
            ledger.passes(activity)
        if not due:
            return True
        self.notifier.poll()
        checkpoints.touch_memory(self.state.snapshots)
        return self.status.write(force)

    def activity(self) -> str:
        """The state of the ledger that the time from now on belongs to."""
        at, known = self.at, self.state.ledger
        if at.state in (State.OPENING, State.STOPPING, *FINAL) or (at.state is State.RUNNING and self.view is None):
            return known.state
        if at.state is State.QUEUED or (at.state is State.BACKOFF and time.monotonic() < at.due_s):
            return "waiting"
        if at.state in WATCHED and self.status.phases & {"first_step", "step"}:
            return "training"
        return "recovering" if known.pending else "loading"

    def poll_s(self) -> float:
        """Seconds until the next turn."""
        if self.at.give_up_s:
            return UNKILLABLE_POLL_S
        watches = self.at.state in (State.RUNNING, State.SUSPECT, State.SLOW, State.STOPPING)
        usual_s = self.watch.poll_s() if watches else IDLE_POLL_S
        if (left_s := self.at.due_s - time.monotonic()) > 0:
            return min(usual_s, left_s + 0.005)
        return 0.0 if self.at.state in (State.OPENING, State.RECOVERING, State.BACKOFF) else usual_s

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
        gap_s = view.now_s - self.last_step_s if self.last_step_s is not None else 0.0
        self.last_step_s = view.now_s
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
        self.status.phases.clear()

    def drop_probe(self) -> None:
        """The suspicion is over: end what its probe still does."""
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
        with contextlib.suppress(OSError):
            if place not in self.errors:
                self.errors.add(place)
                self.folder.log(f"unexpected error in state {self.at.state}; the monitor continues\n{text}")
                self.folder.event("monitor_error", f"the monitor had an error and continues: {last}")
            self.drop_probe()  # evidence that an error cut short must not be compared
            now_s = time.monotonic()
            since_s, step = self.errors_since = self.errors_since or (now_s, self.state.best_step)
            if now_s - since_s >= limit_s:
                self.errors_since = None
                if self.attempt is None or self.observe(self.attempt, fresh=True).step <= step:
                    # The monitor itself is broken: stop the run with that reason; its checkpoints are kept.
                    with contextlib.suppress(Unkillable):
                        if self.attempt is not None:
                            kill_processes(self, self.attempt)
                    reason = f"the monitor cannot watch this run: {last}; see monitor.log. Checkpoints are kept"
                    self.enter(Transition(State.FAILED, reason))
        with contextlib.suppress(OSError):
            time.sleep(ERROR_PAUSE_S)

    # ---- the end of the run ----

    def unkillable(self, names: str) -> Transition:
        """Processes in uninterruptible sleep: wait for them, start no second writer."""
        now_s = time.monotonic()
        message = f"cannot be killed: {names}; nothing else is started while it lives"
        if self.remaining_s() < math.inf:  # the next start looks for them first
            return Transition(State.PREEMPTED, f"preempted; {message}")
        if self.at.give_up_s and now_s >= self.at.give_up_s:
            return Transition(State.UNKILLABLE, message)
        if not self.at.give_up_s:
            self.folder.event("crash", message)
        return Transition(self.at.state, message, now_s, self.at.give_up_s or now_s + self.config.end.unkillable_s)

    def finish(self, end: Transition) -> Transition:
        """Reach a final state; the newest steps are on the disk, and what the store lacks is copied, before that."""
        self.standby.close()
        reason = end.message
        if end.state is not State.COMPLETED and (unkept := checkpoints.keep_newest(self, self.pause_at_end)):
            reason = f"{reason}; {unkept}"
        if missing := self.flush_store():
            reason = f"{reason}; {missing}"
        goes_on = self.several and end.state is State.PREEMPTED  # the next monitor takes up its incident
        if (incident := self.incident) is not None and not goes_on:
            if end.state is State.COMPLETED:
                incident.recovered(self.folder, time.monotonic(), COMPLETED)
            else:
                ended = f"the run ended before it recovered: {reason}"
                incident.close(self.folder, ended if incident.outcome == RESTARTING else incident.outcome)
        self.state.failing &= end.state is State.UNKILLABLE
        self.state.code, self.state.reason = EXIT_CODES[end.state] if end.code is None else end.code, reason
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
        if self.at.state is not State.STOPPING:
            self.enter(Transition(State.STOPPING, "copying the last files to the store"))

        def limit_s() -> float:
            nonlocal until_s
            numbers, request = list(self.signals), self.folder.stop_request()
            del self.signals[: len(numbers)]
            if signal.SIGTERM in numbers:
                until_s = min(until_s, time.monotonic() + self.config.end.preempt_total_s)
            if request is not None:
                self.folder.clear_stop_request()
            pauses = request is None or request.get("pause") is True  # for another run, which can wait
            if not pauses or any(number != signal.SIGTERM for number in numbers):
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
                hurried = state.shutdown is not None or not self.store.view.reachable
                limit_s = self.config.store.release_s if hurried else self.config.end.preempt_total_s
                self.store.close(min(limit_s, self.remaining_s()) if self.at.state in FINAL else 0.0)
            with contextlib.ExitStack() as stack:
                final = self.at.state in FINAL and self.at.state is not State.UNKILLABLE
                stack.callback(self.queue.release)  # last of these: nothing of the run uses the GPU any more
                for part in (self.gpus, self.prewarm, self.standby):
                    stack.callback(part.close)
                stack.callback(self.drop_probe)
                if final and self.attempt is not None:
                    stack.callback(self.attempt.close)
                if final and not self.unkept:
                    stack.callback(platform.drop_private, Path(state.snapshots))
                    state.snapshots = ""
                if final:
                    state.current, state.failing, state.shutdown = None, False, None
                    asked = step_requests.FILES.items() if self.leads else ()
                    for kind in [one for one, name in asked if (self.folder.folder / name).exists()]:
                        step_requests.refuse(self.folder.folder, kind, state.best_step, f"the run is {self.at.state}")
                self.notifier.poll(last_message_s)
                while not all([state.save(self.folder), self.write_status(force=True)]) and time.monotonic() < until_s:
                    time.sleep(ERROR_PAUSE_S)
                    self.folder.ends = final
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


# ---- the status ----


class StatusWriter:
    """Writes what the page and the command line read: `status.json`, the events of phases and checkpoints, GPU samples.

    Decides nothing, and a reading that fails costs that reading: the next one is at most a few seconds away. The
    machine's figures (GPU, processor, memory, disk) are read every MACHINE_S seconds; a second's write copies them.
    parent_pid: the process that restarts this monitor when it is killed.
    """

    def __init__(self, run: Run, parent_pid: int | None):
        self.run, self.parent_pid = run, parent_pid
        self.phases: set[str] = set()  # that this attempt has entered; an event told of each
        self.written_s = self._checkpoints_s = self._gpu_s = self._machine_s = -1e9
        self._machine: dict[str, Any] = {}
        shown = read_json(run.folder.own / STATUS) or {}
        self._last_step = {"epoch": shown.get("epoch", 0), "loss": shown.get("loss")}  # also of an attempt before
        self._sample = Sample(0.0)  # of the attempt's processes
        self._progress_utc: str | None = None
        self._states: dict[Path, int] | None = None  # the complete ones, with their steps
        self._files: dict[str, Any] = {"checkpoint": None}

    def note_phase(self, beats: Sequence[Beat]) -> None:
        """An event for every phase that is entered for the first time in this attempt."""
        if beats and beats[0].phase not in self.phases:
            first = beats[0]
            self.phases.add(first.phase)
            total = f", {first.total} items" if first.total else ""
            self.run.folder.event("phase", f"{first.phase}{total}", phase=first.phase, step=first.step)

    def write(self, force: bool) -> bool:
        """Replace status.json; False when it could not be written. `force`: with a new look at the checkpoints."""
        run, now = self.run, platform.now()
        state = run.at.state
        self.written_s = now.mono_s
        if force or now.mono_s - self._checkpoints_s >= CHECKPOINTS_S:
            self._checkpoints_s = now.mono_s
            if self._look_at_folder() and state in ACTIVE:
                run.state.save(run.folder)  # its ledger: after a power cut, no later status may be left
        attempt = run.attempt if state in ACTIVE else None
        if now.mono_s - self._machine_s >= MACHINE_S:
            self._machine_s = now.mono_s
            self._machine = self._sample_machine(now, attempt)
        if attempt and run.watch.ranks:
            self._progress_utc = platform.utc(now.wall_s - (now.mono_s - run.watch.last_progress_s()))
        saved, folder, beats = run.state, run.folder, run.view.beats if run.view else []
        beat = beats[0] if beats else None
        current = beat if attempt else None
        step = max([b.step for b in beats] or [saved.best_step]) or saved.resumed_step
        step_s, left = run.watch.step_s(), saved.planned - step
        if not step or (beat and beat.count):  # a process that resumes knows neither until its first step
            loss = beat.loss if beat else math.nan
            self._last_step = {"epoch": beat.epoch if beat else 0, "loss": loss if math.isfinite(loss) else None}
        values: dict[str, Any] = {  # the keys are the contract with the page
            "version": 1,
            "name": folder.name,
            "folder": str(folder.folder),
            "state": State.QUEUED if state is State.OPENING else state,
            "phase": current.phase if current else None,
            "phase_done": current.done if current else 0,
            "phase_total": current.total if current else 0,
            "note": current.note if current else "",
            "step": step,
            "planned_steps": saved.planned,
            **self._last_step,
            "step_s": round(step_s, 4) or None,
            "eta_s": round(left * step_s, 1) if step_s and left > 0 and attempt else None,
            "attempt": saved.attempt,
            "restarts": saved.restarts,
            "pid": attempt.pid if attempt else None,  # the script's shell
            "trainer_pids": [b.pid for b in beats] if attempt else [],
            "monitor_pid": os.getpid(),
            "keeper_pid": self.parent_pid,
            "started_at": saved.started_at,
            "elapsed_s": round(saved.ledger.wall_s - saved.ledger.seconds["waiting"], 1),
            "ledger": vars(saved.ledger),
            "devices": run.queue.devices,  # the GPUs that this run queues for
            **self._machine,
            "updated_at": now.utc,
            "updated_mono_s": round(now.mono_s, 3),  # with the boot, its age does not depend on the wall clock
            "boot": saved.ledger.boot[:8],
            "last_progress_at": self._progress_utc,
            "message": run.at.message,
            **self._files,
            "reason": saved.reason,
            "changes": [c["sentence"] for c in saved.changes],
            "slow": run.slow or None,
            **({"host": socket.gethostname(), "machines": machines(folder.folder)} if run.several else {}),
            "standby": run.standby.summary(),  # the next attempt, started early
            "store": run.store.summary() if run.store else None,
        }
        saved.save_again(folder)
        return folder.write_status(values)

    def _look_at_folder(self) -> bool:
        """The newest checkpoint, the LoRA, incidents, snapshots; an event for a new checkpoint, and True."""
        folder, saved = self.run.folder, self.run.state
        self._files |= {
            "incidents": len(folder.incident_numbers()),
            "lora": str(lora) if (lora := folder.lora) else None,
            "snapshots": checkpoints.memory_summary(saved.snapshots, saved.snapshots_off),  # None where there are none
        }
        try:
            found = checkpoints.states(self.run.state_folders())
        except OSError:
            return False
        known, self._states = self._states, {path: step for path, step in found.items() if step >= 0}
        newest, step = next(iter(self._states.items()), (None, 0))
        self._files["checkpoint"] = {"path": str(newest), "step": step} if newest else None
        if newest is None or known is None or newest in known:
            return False
        folder.event("checkpoint", f"checkpoint of step {step}: {newest.name}", step=step, path=str(newest))
        return True

    def _sample_machine(self, now: Moment, attempt: Attempt | None) -> dict[str, Any]:
        """What the run uses: {"gpus", "cpu_cores", "memory_bytes", "disk_free"}; None for what is not known."""
        readings, folder, disk_free = self.run.gpus.read(), self.run.folder, None
        if now.mono_s - self._gpu_s >= GPU_S:
            self._gpu_s = now.mono_s
            for i, reading in enumerate(readings):
                values = {k: v for k, v in reading.items() if k not in ("pids", "spill", "uuid", "bus", "use")}
                folder.metric({"kind": "gpu", "t": now.utc, "gpu": i, **values})
        known = processes(attempt.tree.keys(), Missing()) if attempt else {}
        before, self._sample = self._sample, Sample(now.mono_s, known)
        used_s = growths(before, self._sample, "cpu_s")
        with contextlib.suppress(OSError):
            disk_free = shutil.disk_usage(folder.folder).free
        own = gpu.own(readings, self.run.queue.devices)
        return {
            "gpus": [{key: reading[key] for key in GPU_KEYS if key in reading} for reading in own],
            "cpu_cores": round(sum(used_s) / (self._sample.at_s - before.at_s), 2) if used_s else None,
            "memory_bytes": platform.private_bytes(*attempt.tree.members) or None if attempt else None,
            "disk_free": disk_free,
        }
