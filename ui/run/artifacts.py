"""What a run has made: its LoRA files and its sample images.

A file counts when it is complete: the trainers write to a hidden name and rename, and safetensors refuses a file that
is shorter than its header says, which covers scripts of the user's own. Both lists are made again only after a change.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from runs.evolution import NUMBERED, SUFFIX, Lora, Sample, moment, read_lora, read_prompts, read_samples
from ui.run.readers import Stamp, stamp

__all__ = ["Artifacts", "Gallery", "Lora", "Sample", "gallery_of", "moment", "read_lora", "read_prompts"]


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
            rows = gallery_of(folder, [one.text for one in read_prompts(prompts)])
            if rows != self._gallery.rows:
                self._gallery = Gallery(rows)
            self._listed = now
        return self._gallery


def gallery_of(folder: Path, prompts: Iterable[str]) -> tuple[tuple[str, tuple[Sample, ...]], ...]:
    """The images of a folder as rows, one for each prompt; images with other names are in a last row."""
    texts = dict(enumerate(prompts))
    found: dict[int, list[Sample]] = {}
    for sample in read_samples(folder):
        found.setdefault(sample.prompt, []).append(sample)
    rows = []
    for prompt in sorted(found, key=lambda n: (n < 0, n)):
        title = texts.get(prompt) or (f"Prompt {prompt + 1}" if prompt >= 0 else "Other images")
        rows.append((title, tuple(sorted(found[prompt], key=lambda s: (s.number, s.unit, s.path.name)))))
    return tuple(rows)
