"""The looks at a living attempt: progress noted, suspicion inquired into, the verdict handed on."""

from __future__ import annotations

from dataclasses import replace

from monitor import checkpoints
from monitor.core import Core
from monitor.decide import HUNG, SLOW, SUSPECT, Observation, Signals, Verdict
from monitor.inquiry import Inquiry
from monitor.report import PHASES, count


class Watching(Core):
    """starting → running ⇄ suspect ⇄ slow."""

    def watching(self) -> None:
        """One look at a living attempt."""
        self.beats = self.attempt.beats() or self.beats
        self.note_progress()
        if self.no_trainer():
            return self.over()
        if self.now.mono_s - self._last_tree_s >= self.limits.watch.tree:
            self.attempt.tree.refresh()
            self._last_tree_s = self.now.mono_s
        if self._launcher_alone_s is not None:
            return  # dead, not stuck: its launcher is given time to say so
        verdict = self._verdict()
        if verdict.reset:
            self.files.log(f"timers set back: {verdict.reset}")
        if verdict.kind == HUNG:
            self.hung(verdict)
        elif verdict.kind == SUSPECT:
            self.suspect(verdict)
        elif verdict.kind == SLOW:
            self.slow(verdict)
        else:
            self.well(verdict)

    def _verdict(self) -> Verdict:
        seen = self.observation()
        if self.inquiry is None:
            return self.watch.look(seen)
        self.inquiry.poll()
        self.verifier.poll()
        verdict = self.watch.look(_with(seen, self.inquiry.found))
        if self.inquiry.due(verdict, self.now.mono_s):
            verdict = self.watch.look(_with(seen, self.inquiry.ask(self.beats, verdict.budget_s)))
        return verdict

    def observation(self) -> Observation:
        """What is seen at this look."""
        return Observation(
            self.now.mono_s, self.now.boot_s, tuple(self.beats), self.files.log_size(), stopped=self.attempt.stopped
        )

    def note_progress(self) -> None:
        """New steps: the incident is over, allowance comes back, the chart's facts move on."""
        step = max((b.step for b in self.beats), default=0)
        self.book.planned = max([self.book.planned, *(b.planned for b in self.beats)])
        self.outlook.phases(self.beats)
        if step <= self.book.best_step:
            return
        if self.incident is not None:
            self.recovered(self.book.best_step + 1)
        self.book.best_step = step
        before, self._last_step_s = self._last_step_s, self.now.mono_s
        gap = self.now.mono_s - before if before is not None else 0.0
        if self.book.history.progressed(gap, self.limits.restart):
            self.files.log("ten minutes of new steps: the allowance of restarts is whole again")

    def recovered(self, step: int) -> None:
        """`step` is the first one beyond the one that was reached before the failure."""
        incident, self.incident = self.incident, None
        first = max(self.beats, key=lambda b: b.step)
        later = first.step - step  # steps since, whose durations the record keeps: they say when `step` was complete
        at_s = first.step_s - (sum(first.intervals[-later:]) if later else 0.0)
        incident.recover_s = max(0.0, at_s - incident.progress_s)
        incident.steps_repeated = incident.best_step - (incident.resumed_from or 0)
        incident.ended_at = self.now.utc
        incident.outcome = f"the run went on: step {step} is new"
        incident.save(self.files)
        self.files.event(
            "progress",
            f"step {step} is new: back {incident.recover_s:.1f} s after the last progress, "
            f"{count(incident.steps_repeated, 'step')} repeated",
            incident=incident.number,
        )

    def well(self, verdict: Verdict) -> None:
        """Progress: whatever was suspected is over."""
        if self.state in ("suspect", "slow"):
            self.files.log(f"it moves again: {PHASES[verdict.phase]}, step {verdict.step}")
            self._calm_since_s = self.now.mono_s
            self.was_slow = ""
            self.drop_inquiry()
        self.foresight.tick(self.now.mono_s, self.state_folders(), self.book.changes)
        if self.state != "running" and (any(b.count for b in self.beats) or self.state in ("suspect", "slow")):
            self.turn("running")

    def suspect(self, verdict: Verdict) -> None:
        """Half the budget without progress: gather evidence, touch nothing."""
        if self.inquiry is None:
            self.inquiry = Inquiry(self.attempt.tree, self.attempt.heartbeats, self.limits, self.gpus.read)
            often = self._calm_since_s and self.now.mono_s - self._calm_since_s < self.limits.watch.evidence_pause
            self.inquiry.begin(self.beats, full=not often)
            newest = checkpoints.newest(self.state_folders())
            if newest is not None and not often:
                self.verifier.begin(newest)
            words = (
                f"{PHASES[verdict.phase]}: no progress for {verdict.quiet_s:.1f} s (budget {verdict.budget_s:.1f} s)"
            )
            if not often:
                self.files.event("suspect", words, phase=verdict.phase, step=verdict.step)
        if self.state != "suspect":
            self.turn("suspect", f"no progress for {verdict.quiet_s:.0f} s")

    def slow(self, verdict: Verdict) -> None:
        """Over the budget, but moving: say why, leave it alone."""
        message = self.was_slow = "; ".join(verdict.why)
        if self.state != "slow":
            self.files.event("slow", f"{PHASES[verdict.phase]}: {message}", phase=verdict.phase, step=verdict.step)
            self.turn("slow", message)
        self.message = message

    def no_trainer(self) -> bool:
        """Is there nothing left to wait for? The ranks count, not the launcher: either may outlive the other."""
        root, ranks = self.attempt.root_alive(), self.attempt.ranks_alive(self.beats)
        if not root and ranks and not self._orphan_said:
            self._orphan_said = True
            self.files.log("the launcher is gone, the training lives on: watching it without one")
        if not root or not self.beats or ranks:
            self._launcher_alone_s = None
            return not root and not ranks
        if self._launcher_alone_s is None:
            self._launcher_alone_s = self.now.mono_s
        return self.now.mono_s - self._launcher_alone_s >= self.limits.watch.launcher


def _with(seen: Observation, signals: Signals) -> Observation:
    return replace(seen, signals=signals)
