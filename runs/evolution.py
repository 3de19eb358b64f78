"""How a run's LoRA evolved: its samples, LoRA files and losses as one table, a row for each step that left something.

Pure reading of a run's folder, which other processes write: a missing, incomplete or foreign file leaves a gap, never
an error. Samples before a restart and after it are one series; of a step that was repeated, the newest file counts. A
sample or LoRA whose name has an epoch and no step gets its step from `metrics.jsonl`, or from the metadata of that
epoch's LoRA.
"""

import math
import os
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from runs.growing import Added, entries

SUFFIX = ".safetensors"
IMAGES = (".png", ".jpg", ".jpeg", ".webp")
NUMBERED = re.compile(r"-step(?P<step>\d{6,})$|-(?P<epoch>\d{6})$")
# As kohya's trainers and ours name samples: NAME_STEP_PROMPT_TIME_SEED or NAME_eEPOCH_PROMPT_TIME_SEED.
SAMPLE = re.compile(
    r"_(?P<epoch>e?)(?P<number>\d{6,12})_(?P<prompt>\d{1,6})_(?P<time>\d{8,20})(?:_(?P<seed>\d{1,20}))?"
)
SEED = re.compile(r" --d (\d{1,20})(?= |$)", re.IGNORECASE)
MAX_STEP = 10_000_000  # a larger number in a file is not a step
SMOOTHED = 50  # steps whose mean is the loss of a snapshot: that of a single step depends on its noise
UNITS = (("step", "s"), ("epoch", ""))  # in sd-scripts' metadata: ss_steps, ss_epoch


def moment(unit: str, number: int) -> str:
    """`step 1,200`, `epoch 4` or `before training`."""
    return f"{unit} {number:,}" if number else "before training"


# Files ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lora:
    """A complete LoRA file. `step` and `epoch` are None where neither its name nor its metadata says them."""

    path: Path
    size: int
    final: bool
    step: int | None
    epoch: int | None

    @property
    def at(self) -> str:
        """When it was saved, for people."""
        if self.step:
            return moment("step", self.step)
        numbered = not self.final and self.step is None and NUMBERED.search(self.path.stem)
        return moment("epoch", self.epoch or 0) if self.epoch or numbered else self.path.name


def read_lora(path: Path, size: int) -> Lora | None:
    """The LoRA in this file; None while it is incomplete, or when it is something else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError):
        return None
    match = NUMBERED.search(path.stem)
    numbers = match.groupdict() if match else {}
    step, epoch = (_number(numbers.get(key)) or _number(metadata.get(f"ss_{key}{s}")) for key, s in UNITS)
    return Lora(path, size, path.stem == path.parent.name, step, epoch)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 12 else None


@dataclass(frozen=True)
class Sample:
    """One sample image. `unit` is "step" or "epoch", "" when the name says neither; `prompt` counts from 0.

    drawn: when, as digits that sort, "" where the name does not say.
    """

    path: Path
    unit: str
    number: int
    prompt: int
    seed: int | None = None
    drawn: str = ""

    @property
    def at(self) -> str:
        """When it was drawn, for people."""
        return moment(self.unit, self.number) if self.unit else self.path.name


def read_samples(folder: Path) -> list[Sample]:
    """The sample images of a folder by name, hidden ones not. One whose name says neither step nor epoch has prompt -1."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.lower().endswith(IMAGES) and name[0] != ".")
    except OSError:
        return []
    return [_sample(folder / name) for name in names]


def _sample(path: Path) -> Sample:
    match = SAMPLE.search(path.stem)
    if match is None:
        return Sample(path, "", 0, -1)
    unit, seed = "epoch" if match["epoch"] else "step", int(match["seed"]) if match["seed"] else None
    return Sample(path, unit, int(match["number"]), int(match["prompt"]), seed, match["time"])


@dataclass(frozen=True)
class Prompt:
    """A prompt of the samples, numbered from 0. seed: None where its line sets none."""

    number: int
    text: str
    seed: int | None


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a `sample_prompts.txt` in the trainers' order; [] when it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError:
        return []
    found: list[Prompt] = []
    for line in (line.strip() for line in lines if line.strip() and not line.startswith("#")):
        seed = SEED.search(line)
        found.append(Prompt(len(found), line.split(" --")[0], int(seed[1]) if seed else None))
    return found


# Losses ---------------------------------------------------------------------------------------------------------------


class Losses:
    """The losses in a `metrics.jsonl`, read from where the last read ended. Of a repeated step, the last line counts."""

    def __init__(self, path: Path):
        self._added = Added(path)
        self._begin()

    def _begin(self) -> None:
        self.by_step = array("f")  # NaN where there is none
        self.epoch_end: dict[int, int] = {}  # the last step of each epoch, counted from 1
        self.validation: dict[int, float] = {}

    def update(self) -> None:
        """Read what was added. A file that was replaced or cut is read from its beginning."""
        place = ""
        while place != self._added.place:
            place = self._added.place
            lines, new = self._added.lines()
            if new:
                self._begin()
            self._take(lines)

    def _take(self, lines: list[bytes]) -> None:
        for entry in entries(lines):
            step = entry.get("step")
            if type(step) is not int or not 0 <= step <= MAX_STEP:
                continue
            if entry.get("kind") == "validation":
                value = _finite(entry.get("val_loss"))
                if value is not None:
                    self.validation[step] = value
            elif entry.get("kind") == "step":
                missing = step + 1 - len(self.by_step)
                if missing > 0:
                    self.by_step.extend([math.nan] * missing)
                value = _finite(entry.get("loss"))
                self.by_step[step] = math.nan if value is None else value
                epoch = entry.get("epoch")
                if type(epoch) is int and 0 < epoch <= MAX_STEP:
                    self.epoch_end[epoch] = max(step, self.epoch_end.get(epoch, 0))

    def between(self, first: int, last: int) -> list[float]:
        """The losses of the steps from `first` to `last`, those that are finite."""
        return [value for value in self.by_step[max(0, first) : max(0, last + 1)] if not math.isnan(value)]

    def at(self, step: int) -> float | None:
        """The mean loss of the SMOOTHED steps up to this one; None without any."""
        found = self.between(step - SMOOTHED + 1, step)
        return sum(found) / len(found) if found else None


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        return None
    return float(value)


# The table ------------------------------------------------------------------------------------------------------------


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


def table(prompts: Iterable[Prompt], samples: Iterable[Sample], loras: Iterable[Lora], losses: Losses) -> Evolution:
    """The snapshots of a run from what its folder has. A pure function but for the files' times."""
    files = sorted(loras, key=lambda one: (one.final, one.path.name), reverse=True)
    ends = {one.epoch: one.step for one in files if one.epoch and one.step and not one.final} | losses.epoch_end

    def key(unit: str, number: int) -> tuple[int | None, int | None]:
        if unit == "step" or number == 0:
            return number, None
        return (ends[number], None) if number in ends else (None, number)

    rows: dict[tuple[int | None, int | None], dict[int, Sample]] = {}
    others = []
    for sample in samples:
        if not sample.unit:
            others.append(sample)
        else:
            row = rows.setdefault(key(sample.unit, sample.number), {})
            before = row.get(sample.prompt)
            if before is None or before.drawn <= sample.drawn:
                row[sample.prompt] = sample
    saved: dict[tuple[int | None, int | None], Lora] = {}
    for one in files:
        if one.step or one.epoch:
            at = (one.step, None) if one.step else key("epoch", one.epoch or 0)
            saved.setdefault(at, one)
            rows.setdefault(at, {})
    starts = sorted(losses.epoch_end.items())
    found = []
    for (step, epoch), row in rows.items():
        lora = saved.get((step, epoch))
        drawn = tuple(row[prompt] for prompt in sorted(row))
        paths = [lora.path] if lora else [sample.path for sample in drawn]
        of_step = next((e for e, end in starts if step is not None and 0 < step <= end), None)
        found.append(
            Snapshot(
                step,
                epoch or of_step,
                max((t for path in paths if (t := _mtime(path)) is not None), default=None),
                losses.at(step) if step is not None else None,
                losses.validation.get(step) if step is not None else None,
                lora,
                drawn,
            )
        )
    found.sort(key=lambda one: (one.step is None, one.step or 0, one.epoch or 0))
    return Evolution(tuple(prompts), tuple(found), tuple(sorted(losses.validation.items())), tuple(others))


def best(validation: Iterable[tuple[int, float]]) -> tuple[int, float] | None:
    """(step, loss) of the lowest validation loss; of equal ones the first. None without a validation after step 0."""
    return min((one for one in validation if one[0]), key=lambda one: one[1], default=None)


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
