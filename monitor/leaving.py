"""The end that was asked for: by the user (a checkpoint first), or because the machine is taken away."""

from __future__ import annotations

import signal

from monitor import checkpoints
from monitor.core import EXIT_FAILED, EXIT_PREEMPTED, EXIT_STOPPED, Core
from monitor.decide import HUNG, SLOW


class Leaving(Core):
    """any state → stopping → stopped | preempted."""

    def asked(self) -> None:
        """Act on a signal or on the user's wish to stop."""
        numbers, self._signals = self._signals, []
        wish = self.files.stop_asked()
        if signal.SIGTERM in numbers:
            self.preempt()
        elif wish is not None or numbers:
            self.files.stop_done()
            self.stop(now=bool((wish or {}).get("now")) or self.state == "stopping")

    def stop(self, now: bool = False) -> None:
        """The user's stop: a checkpoint first, then the end."""
        self._leave("stopped", 0.0 if now else self.limits.end.stop_save, "saving a checkpoint, then stopping")

    def preempt(self) -> None:
        """The machine is taken away: a checkpoint if there is time, a clean end within 25 s, resumable."""
        self._leave("preempted", self.limits.end.preempt_save, "the machine is needed: saving a checkpoint")

    def _leave(self, ending: str, patience_s: float, message: str) -> None:
        self._ending = ending
        if self.state == "recovering":  # processes that cannot be ended: the next start looks for them first
            if ending == "preempted":
                return self.finish("preempted", EXIT_PREEMPTED, f"preempted; {self.message}")
            return self.finish("unkillable", EXIT_FAILED, self.message)
        if self.attempt is None or self.state in ("queued", "backoff"):
            return self._left()
        stepped = any(b.count for b in self.beats)
        if not self.attempt.ask_to_stop() or not stepped:
            patience_s = min(patience_s, 2.0)  # no step yet: there is nothing to save
        self.due_s = self.now.mono_s + patience_s
        self.files.event("stopping", message)
        self.turn("stopping", message)

    def stopping(self) -> None:
        """Waiting for the checkpoint; a hang, the deadline or the end of the training ends the waiting."""
        self.beats = self.attempt.beats() or self.beats
        self.note_progress()
        over = self.no_trainer()
        if not over and self.now.mono_s < self.due_s and self._verdict().kind not in (HUNG, SLOW):
            return
        end = self.limits.end
        preempted = self._ending == "preempted"
        if self.end_processes(*((end.preempt_grace, end.preempt_kill) if preempted else (end.stop_grace, None))):
            return self.unkillable(None)
        self.last_words()
        if self.attempt.exit(self.beats).outcome == "done":
            return self.complete()
        self._left()

    def _left(self) -> None:
        newest = checkpoints.newest(self.state_folders())
        where = f"step {self._step()}" + (f", its checkpoint: {newest.name}" if newest else ", without a checkpoint")
        code = EXIT_STOPPED if self._ending == "stopped" else EXIT_PREEMPTED
        self.finish(self._ending, code, f"{self._ending} at {where}")
