"""The numbers of a run, read from its growing `metrics.jsonl`: loss, learning rate and time of each step, and the GPUs' samples.

After a restart the trainer repeats the steps since its checkpoint. The later attempt counts: a line whose step is not
larger than the last one removes the steps from there on. So steps always rise, and all attempts together are one line.

Each update reads only what was added (runs/growing.py). A run of 100,000 steps is 17 MB, which one update reads; of a
larger file, each update reads READ_BYTES. Numbers are kept in arrays of numpy, which Gradio has loaded anyway.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runs.growing import Added
from runs.metrics_lines import entries

READ_BYTES = 24 << 20
BATCH_LINES = 5000  # lines that are objects at the same time
MAX_STEP = 10_000_000  # a larger number in a file is not a step
MOST_GPUS = 16
MOST_RESTARTS = 1000
LARGEST = 1e30  # a larger number is not a measurement
STEP = ("step", "t_s", "loss", "lr", "step_s")
GPU = ("t_s", "utilization", "memory_used", "power_w", "temperature")


Columns = dict[str, np.ndarray]


def nothing(names: tuple[str, ...]) -> Columns:
    """Columns without a row."""
    return {name: np.empty(0) for name in names}


def joined(one: Columns, more: Columns) -> Columns:
    """The rows of both."""
    return {name: np.concatenate([column, more[name]]) for name, column in one.items()}


@dataclass(frozen=True)
class Restart:
    """Where a later attempt continued: its first step, and when (seconds since 1970)."""

    step: int
    t_s: float


class Metrics:
    """A run's numbers.

    revision: another text when there are others, also after a restart of the server. share: how much of the file was read, 0 to 1.
    """

    def __init__(self, path: Path):
        self._added = Added(path)
        self._begin()
        self.revision = ""

    def _begin(self) -> None:
        self._attempt: int | None = None
        self.steps = nothing(STEP)
        self.gpus: dict[int, Columns] = {}
        self.gpu_names: dict[int, str] = {}
        self.gpu_memory: dict[int, float] = {}  # bytes
        self.restarts: list[Restart] = []
        self._validation: dict[int, tuple[float, float]] = {}  # step: time, loss of the held-out images
        self.share = 1.0

    def update(self) -> "Metrics":
        """Read what was added, at most READ_BYTES."""
        before = self._added.place
        lines, new = self._added.lines(READ_BYTES)
        if new:
            self._begin()
        if new or self._added.place != before:
            for first in range(0, len(lines), BATCH_LINES):
                self._take(entries(lines[first : first + BATCH_LINES]))
            self.share = self._added.offset / self._added.size if self._added.size else 1.0
            self.revision = self._added.place
        return self

    def _take(self, found: list[dict[str, Any]]) -> None:
        steps = [one for one in found if one.get("kind") == "step" and _is_step(one.get("step"))]
        if steps:
            self._take_steps(steps)
        for one in found:
            if one.get("kind") == "validation" and _is_step(one.get("step")):
                self._validation[one["step"]] = float(times([one.get("t")])[0]), number(one.get("val_loss"))
            index = one.get("gpu")
            if one.get("kind") == "gpu" and type(index) is int and 0 <= index < MOST_GPUS:
                rows = {name: np.array([number(one.get(name))]) for name in GPU}
                rows["t_s"] = times([one.get("t")])
                self.gpus[index] = joined(self.gpus.get(index) or nothing(GPU), rows)
                self.gpu_names[index] = str(one.get("name") or self.gpu_names.get(index, ""))[:100]
                self.gpu_memory[index] = number(one.get("memory_total"))

    def _take_steps(self, found: list[dict[str, Any]]) -> None:
        rows = {name: numbers([one.get(name) for one in found]) for name in ("step", "loss", "lr", "step_s")}
        rows["t_s"] = times([one.get("t") for one in found])
        attempts = [one.get("attempt") for one in found]
        begin, last = 0, self.steps["step"][-1] if len(self.steps["step"]) else -1.0
        first = self._attempt if self._attempt is not None else attempts[0]
        if (
            type(first) is int
            and attempts.count(first) == len(attempts)
            and (np.diff(rows["step"], prepend=last) > 0).all()
        ):
            self._attempt = first
            self.steps = joined(self.steps, rows)
            return
        for index, step in enumerate(rows["step"].tolist()):
            attempt = attempts[index] if type(attempts[index]) is int else self._attempt
            if step <= last or (attempt != self._attempt and self._attempt is not None):
                known = joined(self.steps, {name: column[begin:index] for name, column in rows.items()})
                begin, kept = index, int(np.searchsorted(known["step"], step))
                self.steps = {name: column[:kept] for name, column in known.items()}
                if len(self.restarts) < MOST_RESTARTS:
                    self.restarts.append(Restart(int(step), float(rows["t_s"][index])))
            last, self._attempt = step, attempt
        self.steps = joined(self.steps, {name: column[begin:] for name, column in rows.items()})

    def validation(self) -> dict[str, np.ndarray]:
        """The loss of the held-out images in the order of the steps: columns step, t_s and val_loss."""
        rows = [(step, *values) for step, values in sorted(self._validation.items())]
        columns = np.array(rows, np.float64).reshape(len(rows), 3).T
        return dict(zip(("step", "t_s", "val_loss"), columns, strict=True))

    def losses(self) -> dict[int, float]:
        """{step: loss} of the steps with a finite loss."""
        pairs = zip(self.steps["step"].tolist(), self.steps["loss"].tolist(), strict=True)
        return {int(step): loss for step, loss in pairs if math.isfinite(loss)}


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_STEP


def number(value: object) -> float:
    """A number from a file; NaN for everything else and for absurdly large ones."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST:
        return float(value)
    return math.nan


def numbers(values: list[Any]) -> np.ndarray:
    """`number` of each value; all at once where all are numbers."""
    if {*map(type, values)} <= {int, float}:
        try:
            found = np.array(values, np.float64)
            return np.where(np.abs(found) < LARGEST, found, math.nan)
        except OverflowError:
            pass
    return np.array([number(value) for value in values], np.float64)


def times(texts: list[Any]) -> np.ndarray:
    """Seconds since 1970 of UTC times such as 2026-11-22T12:00:00.123Z; NaN for everything else."""
    try:
        found = np.array([text[:23].rstrip("Z") for text in texts], "datetime64[ms]")
    except (TypeError, ValueError, AttributeError, OverflowError):
        if len(texts) == 1:
            return np.array([math.nan])
        return np.concatenate([times([text]) for text in texts])
    return np.where(np.isnat(found), math.nan, found.astype(np.int64) / 1000.0)
