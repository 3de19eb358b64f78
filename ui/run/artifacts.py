"""What a run has made: its LoRA files, and with its sample images and losses how it evolved.

A file counts when it is complete: the trainers write to a hidden name and rename, and safetensors refuses a file that
is shorter than its header says, which covers scripts of the user's own. All is made again only after a change.
"""

import os
from pathlib import Path
from typing import Any

from runs.evolution import SUFFIX, Evolution, Lora, Losses, read_lora, read_prompts, read_samples, table
from ui.run.readers import kept, stamp

SAMPLES, PROMPTS, METRICS = "sample", "sample_prompts.txt", "metrics.jsonl"


class Artifacts:
    """The LoRA files and the snapshots of one run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._losses = Losses(folder / METRICS)
        self._made_of: tuple[Any, ...] = ()
        self._evolution = Evolution()

    def loras(self) -> list[Lora]:
        """The complete files: the final one first, then the newest first."""
        try:
            names = [name for name in os.listdir(self.folder) if name.endswith(SUFFIX) and name[0] != "."]
        except OSError:
            return []
        loras = (self._lora(self.folder / name) for name in names)
        found = [lora for lora in loras if lora is not None]
        return sorted(found, key=lambda one: (one.final, one.step or 0, one.epoch or 0, one.path.name), reverse=True)

    def _lora(self, path: Path) -> Lora | None:
        return kept("lora", path, [path], lambda: read_lora(path, stamp(path).size))

    def evolution(self) -> Evolution:
        """The snapshots, with the samples and losses of each."""
        loras, stamps = self.loras(), [stamp(self.folder / name) for name in (SAMPLES, PROMPTS, METRICS)]
        if (*stamps, *loras) != self._made_of or any(one.young for one in stamps):
            self._losses.update()
            prompts, samples = read_prompts(self.folder / PROMPTS), read_samples(self.folder / SAMPLES)
            self._evolution = table(prompts, samples, loras, self._losses)
            self._made_of = (*stamps, *loras)
        return self._evolution
