"""A run's numbers from its growing `metrics.jsonl`: loss, learning rate and time of each step, the GPUs' samples.

After a restart the trainer repeats the steps since its checkpoint. The later attempt counts: a line replaces the
earlier ones of its step and of later steps. So steps always rise, and all attempts together are one line.

Each update reads only what was added (runs/growing.py). A run of 100,000 steps is 17 MB. Numbers are
kept in arrays of numpy, which Gradio has loaded anyway.
"""

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np

from runs.growing import Added, entries

READ_BYTES = 24 << 20  # that are in memory at the same time
BATCH_LINES = 25_000  # lines that are objects at the same time; each batch copies the columns once
MAX_STEP = 10_000_000  # a larger number in a file is not a step
MOST_GPUS = 16
LARGEST = 1e30  # a larger number is not a measurement
STEP = ("step", "epoch", "attempt", "loss", "lr", "step_s")
GPU = ("step", "utilization", "memory_used", "power_w", "temperature")
Columns = dict[str, np.ndarray]


def columns(found: list[dict[str, Any]], names: tuple[str, ...]) -> Columns:
    """The numbers of some lines by name."""
    return {name: numbers([one.get(name) for one in found]) for name in names}


def joined(one: Columns, more: Columns) -> Columns:
    """The rows of both."""
    return {name: np.concatenate([column, more[name]]) for name, column in one.items()}


class Metrics:
    """A run's numbers.

    restarts: the first step of each later attempt. validation: the loss on held-out images by step.
    gpus: by number; their "step" is the one that the training had reached. revision: another text when there are
    others, also after a restart of the server. lock: held by the one thread that uses it.
    """

    def __init__(self, path: Path):
        self._added, self.lock = Added(path), threading.Lock()
        self._begin()
        self.revision = ""

    def _begin(self) -> None:
        self.steps = columns([], STEP)
        self._reached = 0  # the largest step so far
        self.restarts: list[int] = []
        self.validation: dict[int, float] = {}
        self.gpus: dict[int, Columns] = {}
        self.gpu_names: dict[int, str] = {}
        self.gpu_memory: dict[int, float] = {}  # bytes

    def update(self) -> "Metrics":
        """Read what was added, READ_BYTES at a time."""
        while True:
            lines, new = self._added.lines(READ_BYTES)
            if new:
                self._begin()
            if self.revision == self._added.place:
                return self
            for first in range(0, len(lines), BATCH_LINES):
                self._take(entries(lines[first : first + BATCH_LINES]))
            self.revision = self._added.place

    def _take(self, found: list[dict[str, Any]]) -> None:
        steps = []
        for one in found:
            if one.get("kind") == "gpu":
                one["step"] = self._reached
            elif one.get("kind") == "step" and _is_step(one.get("step")):
                self._reached = max(self._reached, one["step"])
                steps.append(one)
        self._take_steps(steps)
        held_out = [one for one in found if one.get("kind") == "validation" and _is_step(one.get("step"))]
        losses = numbers([one.get("val_loss") for one in held_out]).tolist()
        self.validation.update(zip((one["step"] for one in held_out), losses, strict=True))
        samples = [one for one in found if one.get("kind") == "gpu" and type(one.get("gpu")) is int]
        for index in {one["gpu"] for one in samples if 0 <= one["gpu"] < MOST_GPUS}:
            own = [one for one in samples if one["gpu"] == index]
            self.gpus[index] = joined(self.gpus.get(index) or columns([], GPU), columns(own, GPU))
            self.gpu_names[index] = str(own[-1].get("name") or self.gpu_names.get(index, ""))[:100]
            self.gpu_memory[index] = float(numbers([own[-1].get("memory_total")])[0])

    def _take_steps(self, found: list[dict[str, Any]]) -> None:
        begin, rows = max(0, len(self.steps["step"]) - 1), joined(self.steps, columns(found, STEP))
        step, attempt = rows["step"], rows["attempt"]
        again = (np.diff(step[begin:]) <= 0) | (np.abs(np.diff(attempt[begin:])) > 0)  # False where one is unknown
        self.restarts += step[begin + 1 :][again].astype(int).tolist()
        last = np.minimum.accumulate(step[::-1])[::-1]  # the smallest step from here on
        kept: np.ndarray = np.append(step[:-1] < last[1:], True)[: len(step)]
        self.steps = {name: column[kept] for name, column in rows.items()}


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_STEP


def numbers(values: list[Any]) -> np.ndarray:
    """Numbers from a file; NaN for everything else and for absurdly large ones. Floats are read all at once."""
    if {*map(type, values)} != {float}:
        values = [one if type(one) in (int, float) and abs(one) < LARGEST else math.nan for one in values]
    found = np.array(values, np.float64)
    return np.where(np.abs(found) < LARGEST, found, math.nan)
