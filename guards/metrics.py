"""One line for each step in `metrics.jsonl`, from which the loss chart and the run's history are drawn.

Decision: the training process appends its own lines, each in a single write with O_APPEND. So no line is lost between
two polls of the monitor, and several writers (the monitor appends GPU samples) never mix. A restart repeats steps; a
reader keeps the last line of each step. Nobody resumes from this file, so it is not fsynced.

A full disk costs lines, never a step: they are counted and reported once. A line that it cut off is ended before the
next one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from guards.checkpoint import append_line
from guards.reading import number


def utc_now() -> str:
    """The current UTC time for people: ISO 8601 with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def say(message: str) -> None:
    """Write a line to the log at once, in one call: loader workers write to the same file."""
    with contextlib.suppress(OSError, ValueError):  # the log's disk is full, or its reader is gone
        print(f"hangproof: {message}\n", end="", file=sys.stderr, flush=True)


class Metrics:
    """Appends step lines. Does nothing without a path."""

    def __init__(self, path: Path | None, attempt: int = 1):
        self.path = path
        self.attempt = attempt
        self.lost = 0  # lines that could not be written

    @classmethod
    def from_env(cls) -> Metrics:
        """Metrics in `$HANGPROOF_RUN/metrics.jsonl` for attempt `$HANGPROOF_ATTEMPT`; without a run, nowhere."""
        run = os.environ.get("HANGPROOF_RUN")
        return cls(Path(run) / "metrics.jsonl" if run else None, number("HANGPROOF_ATTEMPT", 1))

    def _append(self, record: Mapping[str, object]) -> None:
        """Append a line, or count it as lost: the training does not depend on it."""
        if self.path is None:
            return
        try:
            append_line(self.path, record)
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                say(f"{self.path}: {error.strerror or error}; the training goes on and counts the lines that are lost")
            return
        if self.lost:
            say(f"{self.path}: {self.lost} lines were lost")
            self.lost = 0

    def step(self, step: int, epoch: int, loss: float, lr: float, step_s: float) -> None:
        """Optimizer step `step` took `step_s` seconds at learning rate `lr` with loss `loss`."""
        mono_s, step_s = round(time.monotonic(), 3), round(step_s, 6)
        self._append({**self._about("step", step, epoch), "mono_s": mono_s, "loss": loss, "lr": lr, "step_s": step_s})

    def validation(self, step: int, epoch: int, val_loss: float, items: int) -> None:
        """After optimizer step `step` the held-out images had the mean loss `val_loss`, over `items` losses."""
        self._append({**self._about("validation", step, epoch), "val_loss": val_loss, "items": items})

    def _about(self, kind: str, step: int, epoch: int) -> dict[str, object]:
        return {"kind": kind, "t": utc_now(), "attempt": self.attempt, "step": step, "epoch": epoch}
