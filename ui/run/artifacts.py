"""What a run has made: its LoRA files and its sample images.

A file counts when it is complete: the trainers write to a hidden name and rename, and safetensors refuses a file that is
shorter than its header says, which covers scripts of the user's own. Both lists are made again only after a change.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ui.run.readers import Stamp, stamp

SUFFIX = ".safetensors"
NUMBERED = re.compile(r"-step(?P<step>\d{6,})$|-(?P<epoch>\d{6})$")
SAMPLE = re.compile(r"_(?P<epoch>e?)(?P<number>\d{6,})_(?P<prompt>\d+)_\d{8,}")
IMAGES = (".png", ".jpg", ".jpeg", ".webp")


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
        if not self.final and NUMBERED.search(self.path.stem) and self.step is None:
            return moment("epoch", self.epoch or 0)
        return (
            moment("step", self.step) if self.step else (moment("epoch", self.epoch) if self.epoch else self.path.name)
        )


@dataclass(frozen=True)
class Sample:
    """One sample image. `unit` is "step" or "epoch", "" when the name says neither; `prompt` counts from 0."""

    path: Path
    unit: str
    number: int
    prompt: int

    @property
    def at(self) -> str:
        """When it was drawn, for people."""
        return moment(self.unit, self.number) if self.unit else self.path.name


@dataclass(frozen=True, eq=False)
class Gallery:
    """All sample images: (prompt's text, its images in the order of their steps) of each prompt."""

    rows: tuple[tuple[str, tuple[Sample, ...]], ...] = ()

    def of(self, lora: Lora) -> list[Sample]:
        """The images that were drawn when this LoRA was saved."""
        wanted = {("step", lora.step), ("epoch", lora.epoch if lora.final or not _step_in(lora.path) else None)}
        return [sample for _, row in self.rows for sample in row if (sample.unit, sample.number) in wanted]


def _step_in(path: Path) -> bool:
    match = NUMBERED.search(path.stem)
    return bool(match and match["step"])


class Artifacts:
    """The LoRA files and samples of one run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._loras: dict[str, tuple[Stamp, Lora | None]] = {}
        self._listed: tuple[Stamp, Stamp] | None = None
        self._gallery = Gallery()

    def loras(self) -> list[Lora]:
        """The complete files: the final one first, then the newest first."""
        try:
            names = [name for name in os.listdir(self.folder) if name.endswith(SUFFIX) and name[0] != "."]
        except OSError:
            return []
        known, self._loras = self._loras, {}
        for name in names:
            now = stamp(self.folder / name)
            before = known.get(name)
            self._loras[name] = (
                before if before and before[0] == now else (now, read_lora(self.folder / name, now.size))
            )
        found = [lora for _, lora in self._loras.values() if lora is not None]
        return sorted(found, key=lambda one: (one.final, one.step or 0, one.epoch or 0, one.path.name), reverse=True)

    def gallery(self) -> Gallery:
        """The samples; the same object as long as nothing changed."""
        folder, prompts = self.folder / "sample", self.folder / "sample_prompts.txt"
        now = stamp(folder), stamp(prompts)
        if now != self._listed or now[0].young:
            rows = gallery_of(folder, read_prompts(prompts))
            if rows != self._gallery.rows:
                self._gallery = Gallery(rows)
            self._listed = now
        return self._gallery


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


UNITS = (("step", "s"), ("epoch", ""))  # in sd-scripts' metadata: ss_steps, ss_epoch


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 12 else None


def read_prompts(path: Path) -> list[str]:
    """The prompts of a `sample_prompts.txt` without their options, in the trainers' order; [] when it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError:
        return []
    return [line.strip().split(" --")[0] for line in lines if line.strip() and not line.startswith("#")]


def gallery_of(folder: Path, prompts: Iterable[str]) -> tuple[tuple[str, tuple[Sample, ...]], ...]:
    """The images of a folder as rows, one for each prompt; images with other names are in a last row."""
    texts = dict(enumerate(prompts))
    found: dict[int, list[Sample]] = {}
    try:
        names = sorted(name for name in os.listdir(folder) if name.lower().endswith(IMAGES) and name[0] != ".")
    except OSError:
        return ()
    for name in names:
        match = SAMPLE.search(Path(name).stem)
        prompt = int(match["prompt"]) if match else -1
        unit = ("epoch" if match["epoch"] else "step") if match else ""
        found.setdefault(prompt, []).append(Sample(folder / name, unit, int(match["number"]) if match else 0, prompt))
    rows = []
    for prompt in sorted(found, key=lambda n: (n < 0, n)):
        title = texts.get(prompt) or (f"Prompt {prompt + 1}" if prompt >= 0 else "Other images")
        rows.append((title, tuple(sorted(found[prompt], key=lambda s: (s.number, s.unit, s.path.name)))))
    return tuple(rows)
