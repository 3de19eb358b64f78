"""What a training left in a run's folder: its LoRA files and samples, and the prompts of these.

Pure reading of files that other processes write: what is missing, incomplete or foreign is left out, never an error.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".safetensors"
IMAGES = (".png", ".jpg", ".jpeg", ".webp")
NUMBERED = re.compile(r"-step(?P<step>\d{6,})$|-(?P<epoch>\d{6})$")
# As kohya's trainers and ours name samples: NAME_STEP_PROMPT_TIME_SEED or NAME_eEPOCH_PROMPT_TIME_SEED.
SAMPLE = re.compile(
    r"_(?P<epoch>e?)(?P<number>\d{6,12})_(?P<prompt>\d{1,6})_(?P<time>\d{8,20})(?:_(?P<seed>\d{1,20}))?"
)
FOREIGN = re.compile("^\\.|[\ud800-\udfff]")  # a hidden name, or one that is not UTF-8, which no page can name
SEED = re.compile(r" --d (\d{1,20})(?= |$)", re.IGNORECASE)
UNITS = (("step", "s"), ("epoch", ""))  # in sd-scripts' metadata: ss_steps, ss_epoch


def moment(unit: str, number: int) -> str:
    """`step 1,200`, `epoch 4` or `before training`."""
    return f"{unit} {number:,}" if number else "before training"


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


def loras(folder: Path, read: Callable[[Path], Lora | None] | None = None) -> list[Lora]:
    """The complete LoRA files of a run: the final one first, then the newest first. read: by default `read_lora`.

    The trainers write to a hidden name and rename, and safetensors refuses a file that is shorter than its header says,
    which covers scripts of the user's own.
    """
    paths = [path for path in folder.glob(f"*{SUFFIX}") if not FOREIGN.search(path.name)]
    found = [one for one in map(read or read_lora, paths) if one is not None]
    return sorted(found, key=lambda one: (one.final, one.step or 0, one.epoch or 0, one.path.name), reverse=True)


def read_lora(path: Path) -> Lora | None:
    """The LoRA in this file; None while it is incomplete, or when it is something else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            metadata, size = file.metadata() or {}, path.stat().st_size
    except (SafetensorError, OSError):
        return None
    final = path.stem == path.parent.name  # the run's own name may end in a number, such as a date
    match = None if final else NUMBERED.search(path.stem)
    numbers = match.groupdict() if match else {}
    step, epoch = (_number(numbers.get(key)) or _number(metadata.get(f"ss_{key}{s}")) for key, s in UNITS)
    return Lora(path, size, final, step, epoch)


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
    """The visible sample images of a folder by name. One whose name says neither step nor epoch has prompt -1."""
    try:
        names = sorted(one for one in os.listdir(folder) if one.lower().endswith(IMAGES) and not FOREIGN.search(one))
    except OSError:
        return []
    found = []
    for path in map(folder.joinpath, names):
        if (match := SAMPLE.search(path.stem)) is None:
            found.append(Sample(path, "", 0, -1))
            continue
        unit, seed = "epoch" if match["epoch"] else "step", int(match["seed"]) if match["seed"] else None
        found.append(Sample(path, unit, int(match["number"]), int(match["prompt"]), seed, match["time"]))
    return found


@dataclass(frozen=True)
class Prompt:
    """A prompt of the samples, numbered from 0. seed: None where its line sets none."""

    number: int
    text: str
    seed: int | None


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a `sample_prompts.txt` in the trainers' order; [] when it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").split("\n")  # as the trainers do
    except OSError:
        return []
    found: list[Prompt] = []
    for line in (line.strip() for line in lines if line.strip() and not line.startswith("#")):
        seed = SEED.search(line)
        found.append(Prompt(len(found), line.split(" --")[0], int(seed[1]) if seed else None))
    return found
