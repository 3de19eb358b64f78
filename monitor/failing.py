"""What follows a hang or a crash: evidence, the end of the old processes, a cause, and a restart or the report."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from guards.heartbeat import REQUEST_TERM
from monitor import causes, checkpoints, clock, policy, postmortem
from monitor.attempt import Exit
from monitor.causes import Cause
from monitor.core import EXIT_BUDGET, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, Core, Interrupted
from monitor.decide import Verdict
from monitor.evidence import Evidence
from monitor.folder import MonitorError
from monitor.helpers import next_change
from monitor.report import PHASES, count


def at(evidence: Evidence) -> str:
    """`training, step 12`."""
    return f"{PHASES[evidence.phase]}, step {evidence.step}"


class Failing(Core):
    """recovering → backoff | failed | unkillable; running → completed."""

    def over(self) -> None:
        """No process trains any more: done, stopped, or a crash."""
        newest = checkpoints.newest(self.state_folders())
        if newest is not None:
            self.verifier.begin(newest)  # its answer is wanted in a moment
        self.last_words()
        left = self.attempt.exit(self.beats)
        evidence = None
        stopped = self.stopped_as_asked(left)
        if not left.done and not stopped:
            evidence = postmortem.crash(self, left)
        if self.end_processes(self.limits.end.grace):
            if evidence is not None:
                self.record(evidence)
            return self.unkillable(evidence)
        if left.done:
            return self.complete()
        if stopped:
            return self.finish("stopped", EXIT_STOPPED, f"stopped at step {self._step()}, as asked")
        self.failed(evidence)

    def stopped_as_asked(self, left: Exit) -> bool:
        """Did it stop because a monitor asked it to, and not because somebody else sent it SIGTERM?"""
        return left.outcome == "stopped" and not any(b.request == REQUEST_TERM for b in self.beats)

    def last_words(self) -> None:
        """Read the records again: a process may have said its last word between the look and its end."""
        self.beats = self.attempt.beats(fresh=True) or self.beats
        self.note_progress()
        self.watch.look(self.observation())  # to learn from it; the verdict is known

    def hung(self, verdict: Verdict) -> None:
        """Stuck: say so, keep the evidence, end it, and go on from the last good checkpoint."""
        evidence = postmortem.hang(self, verdict)
        self.last_words()
        left: Exit = self.attempt.exit(self.beats)
        self.turn("recovering", f"stuck in {evidence.phase} for {evidence.quiet_s:.1f} s")
        signs = f" ({'; '.join(evidence.why)})" if evidence.why else ""
        self.files.event(
            "hang",
            f"{causes.match(evidence).title}: {at(evidence)}, no progress for {evidence.quiet_s:.1f} s{signs}",
            phase=evidence.phase,
            step=evidence.step,
        )
        cause = self.record(evidence)
        cannot = self.end_processes(self.limits.end.grace)
        self.incident.killed = [{"name": p.name, "pid": p.pid} for p in self.ended.killed]
        if cannot:
            return self.unkillable(evidence)
        if left.done:
            self.incident.outcome = "all steps were done; only the process had not left"
            return self.complete()
        if self.stopped_as_asked(left):
            return self.finish("stopped", EXIT_STOPPED, f"stopped at step {self._step()}, as asked")
        self.decide_on(evidence, cause)

    def failed(self, evidence: Evidence) -> None:
        """Dead before its end."""
        self.turn("recovering", evidence.ended)
        said = f"{causes.match(evidence).title}: {at(evidence)}, {evidence.ended}"
        self.files.event("crash", said, phase=evidence.phase, step=evidence.step)
        cause = self.record(evidence)
        self.incident.killed = [{"name": p.name, "pid": p.pid} for p in self.ended.killed]
        self.decide_on(evidence, cause)

    def record(self, evidence: Evidence) -> Cause:
        """Open the incident's folder; the cause."""
        previous = self.incident
        if previous is not None:
            previous.outcome = "the restart after it failed too"
            previous.ended_at = self.now.utc
            previous.save(self.files)
        self.incident, cause = postmortem.incident(self, evidence)
        self.files.log(f"incident {self.incident.number}: {cause.title}. {cause.explanation}")
        return cause

    def unkillable(self, evidence: Evidence | None) -> None:
        """A process in uninterruptible sleep: wait for it, start no second writer."""
        self._evidence = evidence
        names = ", ".join(f"{p.name} ({p.pid}, state {p.state})" for p in self.attempt.tree.members.values())
        self.due_s = clock.now().mono_s + self.limits.end.unkillable
        self.files.event("crash", f"cannot be ended: {names}; nothing else is started while it lives")
        self.turn("recovering", f"cannot be ended: {names}")

    def ending_rest(self) -> None:
        """Waiting for processes that would not die."""
        if self.attempt.tree.refresh():
            if self.now.mono_s >= self.due_s:
                self.finish("unkillable", EXIT_FAILED, self.message)
            return
        left = self.attempt.exit(self.beats)
        if left.done:
            return self.complete()
        if self._evidence is None:
            return self._left()  # it was to be stopped
        self.decide_on(self._evidence, self.incident.cause)

    def decide_on(self, evidence: Evidence, cause: Cause) -> None:
        """Restart or stop, by the policy; the ladder's next step if it is its turn."""
        self.drop_inquiry()
        self.attempt.close()
        self.book.attempt_under_way = None
        incident = self.incident
        new_steps = self.book.best_step > self._best_before
        mark = policy.fingerprint(evidence.phase, evidence.step, cause.name)
        change = self._change(cause)
        if not cause.restart:
            return self.give_up(cause.explanation, EXIT_FAILED)
        plan = policy.after_failure(self.book.history, mark, new_steps, bool(change), self.limits.restart, cause.wait_s)
        if plan.stop:
            return self.give_up(plan.stop, EXIT_BUDGET)
        if change:
            self.book.changes.append(change)
            incident.changed.append(change["sentence"])
            self.files.event("mitigated", change["sentence"], change=change["name"])
        self.book.restarts += 1
        self.book.known = self.watch.learned()
        self.book.save(self.files)
        self.due_s = clock.now().mono_s + plan.wait_s
        if plan.wait_s:
            self.files.event("backoff", f"restarting in {plan.wait_s:.0f} s")
        incident.save(self.files)
        self.turn("backoff", f"{cause.title}; restarting" + (f" in {plan.wait_s:.0f} s" if plan.wait_s else ""))
        if not plan.wait_s and not self._signals:
            with contextlib.suppress(Interrupted):
                self.begin()

    def _change(self, cause: Cause) -> dict:
        """The ladder's next mitigation: from a cause's second failure on, or at once where the cause is certain to return."""
        count = self.book.used[cause.name] = self.book.used.get(cause.name, 0) + 1
        if not cause.ladder or (count < 2 and not cause.at_once):
            return {}
        try:
            return next_change(self.files, cause.ladder, self.book.changes, self.limits.check.render, self.pause)
        except MonitorError as error:
            self.files.log(f"no mitigation: {error}")
        except Interrupted:
            pass  # the run is about to be stopped: nothing needs changing
        return {}

    def backing_off(self) -> None:
        if self.now.mono_s >= self.due_s:
            self.begin()

    def complete(self) -> None:
        """The training said that it is done."""
        self.outlook.keep_learned()
        if self.incident is not None:
            self.incident.ended_at = self.now.utc
            if self.incident.recover_s is None and not self.incident.outcome.startswith("all steps"):
                self.incident.outcome = "the run completed"
            self.incident.save(self.files)
        self.fetch_lora()
        step = self._step()
        lora = f"; the LoRA: {self.files.lora.name}" if self.files.lora else ""
        self.finish("completed", EXIT_DONE, f"{count(step, 'step')}, {count(self.book.restarts, 'restart')}{lora}")

    def fetch_lora(self) -> None:
        """States that were written to another disk first are copied by the script as it ends; if it was ended, by us."""
        place = Path(self.book.save_dir) if self.book.save_dir else None
        if place is None or not place.is_dir() or self.files.lora is not None:
            return
        try:
            shutil.copytree(place, self.files.folder, dirs_exist_ok=True)
        except OSError as error:
            self.files.log(f"the LoRA stays in {place}: it cannot be copied: {error}")

    def give_up(self, reason: str, code: int) -> None:
        """No restart would help: stop with the report."""
        newest = checkpoints.newest(self.state_folders())
        kept = f"; {newest.name} is kept, and a new start goes on from there" if newest else ""
        self.incident.outcome = f"the run was given up: {reason}{kept}"
        self.incident.ended_at = self.now.utc
        self.incident.save(self.files)
        cause = self.incident.cause
        report = f"incidents/{self.incident.number}/report.md"
        advice = f" {cause.advice}" if cause.advice else ""
        self.finish("failed", code, f"{cause.title}. {cause.explanation}{advice} Given up: {reason}; see {report}")
