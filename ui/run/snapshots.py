"""How a run's LoRA evolved: its samples, LoRA files and losses as one table, a row for each step that left something.

Samples before a restart and after it are one series; of a step that was repeated, the newest file counts. A sample or
LoRA whose name has an epoch and no step gets its step from `metrics.jsonl`, or from the metadata of that epoch's LoRA.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from runs.results import Lora, Prompt, Sample, moment
from ui.run.metrics import Metrics
from ui.run.readers import stamp

SMOOTHED = 50  # steps whose mean is the loss of a snapshot: that of a single step depends on its noise
At = tuple[int | None, int | None]  # a step, or an epoch whose step is not known


@dataclass(frozen=True)
class Snapshot:
    """What a run left at one step: its LoRA, its samples by prompt, its losses.

    step: None where only the epoch is known. loss: the mean of the last SMOOTHED steps; time: UTC seconds since 1970.
    """

    step: int | None
    epoch: int | None
    time: float | None
    loss: float | None
    val_loss: float | None
    lora: Lora | None
    samples: tuple[Sample, ...]

    @property
    def at(self) -> str:
        """Its step, or its epoch, for people."""
        return moment("epoch", self.epoch or 0) if self.step is None else moment("step", self.step)


@dataclass(frozen=True)
class Evolution:
    """All snapshots of a run in the order of their steps, its prompts, and its validation losses by step.

    others: images among the samples whose names say neither step nor epoch.
    """

    prompts: tuple[Prompt, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    validation: tuple[tuple[int, float], ...] = ()
    others: tuple[Sample, ...] = ()


def table(prompts: Iterable[Prompt], samples: Sequence[Sample], loras: Iterable[Lora], metrics: Metrics) -> Evolution:
    """The snapshots of a run from what its folder has. A pure function but for the files' times."""
    files = sorted(loras, key=lambda one: (one.final, one.path.name), reverse=True)
    trained, epochs, losses = (metrics.steps[name] for name in ("step", "epoch", "loss"))
    ends = np.flatnonzero(np.diff(epochs, append=0))  # of the epochs; also where one is unknown
    last = dict(sorted((int(epochs[n]), int(trained[n])) for n in ends if epochs[n] > 0))
    known = {one.epoch: one.step for one in files if one.epoch and one.step and not one.final} | last
    validation = {step: loss for step, loss in sorted(metrics.validation.items()) if not math.isnan(loss)}

    def key(unit: str, number: int) -> At:
        if unit == "step" or number == 0:
            return number, None
        return (known[number], None) if number in known else (None, number)

    rows: dict[At, dict[int, Sample]] = {}
    others = [sample for sample in samples if not sample.unit]
    for sample in sorted((one for one in samples if one.unit), key=lambda one: one.drawn):
        rows.setdefault(key(sample.unit, sample.number), {})[sample.prompt] = sample
    saved: dict[At, Lora] = {}
    for one in files:
        if one.step or one.epoch:
            at = (one.step, None) if one.step else key("epoch", one.epoch or 0)
            saved.setdefault(at, one)
            rows.setdefault(at, {})
    found = []
    for (step, epoch), row in rows.items():
        lora, loss, held_out = saved.get((step, epoch)), None, None
        drawn = tuple(row[prompt] for prompt in sorted(row))
        if step is not None:
            epoch = next((number for number, end in last.items() if 0 < step <= end), None)
            first, end = (np.searchsorted(trained, one, "right") for one in (step - SMOOTHED, step))
            smoothed = losses[first:end][~np.isnan(losses[first:end])]
            loss, held_out = float(smoothed.mean()) if len(smoothed) else None, validation.get(step)
        times = [stamp(path).mtime_ns / 1e9 for path in ([lora.path] if lora else [sample.path for sample in drawn])]
        time = max(times, default=0.0) or None  # 0: the files are gone
        found.append(Snapshot(step, epoch, time, loss, held_out, lora, drawn))
    found.sort(key=lambda one: (one.step is None, one.step or 0, one.epoch or 0))
    return Evolution(tuple(prompts), tuple(found), tuple(validation.items()), tuple(others))


def best(validation: Iterable[tuple[int, float]]) -> tuple[int, float] | None:
    """(step, loss) of the lowest validation loss; of equal ones the first. None without a validation after step 0."""
    return min((one for one in validation if one[0]), key=lambda one: one[1], default=None)
