"""One line for each step in `metrics.jsonl`, from which the loss chart and the run's history are drawn.

Decision: the training process appends its own lines, each in a single write with O_APPEND. So no line is lost between two
polls of the monitor, and several writers (the monitor appends GPU samples) never mix. A restart repeats steps; a reader
keeps the last line of each step. Nobody resumes from this file, so it is not fsynced.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path


def utc_now() -> str:
    """The current UTC time for people: ISO 8601 with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def append_line(path: str | os.PathLike[str], record: Mapping[str, object]) -> None:
    """Append one JSON line in a single write. NaN and infinity, which JSON lacks, become null. Raises OSError."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    line = (json.dumps(clean, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


class Metrics:
    """Appends step lines. Does nothing without a path."""

    def __init__(self, path: Path | None, attempt: int = 1):
        self.path = path
        self.attempt = attempt

    @classmethod
    def from_env(cls) -> Metrics:
        """Metrics in `$HANGPROOF_RUN/metrics.jsonl` for attempt `$HANGPROOF_ATTEMPT`. Without a run folder nothing is written."""
        run = os.environ.get("HANGPROOF_RUN")
        return cls(Path(run) / "metrics.jsonl" if run else None, int(os.environ.get("HANGPROOF_ATTEMPT", "1")))

    def step(self, step: int, epoch: int, loss: float, lr: float, step_s: float) -> None:
        """Optimizer step `step` took `step_s` seconds at learning rate `lr` with loss `loss`."""
        if self.path is None:
            return
        append_line(
            self.path,
            {
                "kind": "step",
                "t": utc_now(),
                "mono_s": round(time.monotonic(), 3),
                "attempt": self.attempt,
                "step": step,
                "epoch": epoch,
                "loss": loss,
                "lr": lr,
                "step_s": round(step_s, 6),
            },
        )

    def validation(self, step: int, epoch: int, val_loss: float, items: int) -> None:
        """After optimizer step `step` the held-out images had the mean loss `val_loss`, over `items` losses."""
        if self.path is None:
            return
        append_line(
            self.path,
            {
                "kind": "validation",
                "t": utc_now(),
                "attempt": self.attempt,
                "step": step,
                "epoch": epoch,
                "val_loss": val_loss,
                "items": items,
            },
        )
