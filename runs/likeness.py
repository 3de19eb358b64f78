"""The likeness of samples and training images: which model computes it, and the scores that were computed.

`trainer/likeness.py` computes them in a process of its own. A model is used where it is on this machine already, in
`models/likeness/` or in the cache of the hub library; none is downloaded.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from runs.paths import datasets_dir, models_dir

FILE = "likeness.json"
FILE_BYTES = 8 << 20
KINDS = ("dinov2", "dinov2_with_registers", "dinov3_vit", "clip", "siglip", "siglip2")
NEEDED = ("config.json", "model.safetensors", "preprocessor_config.json")
# Hub id: name for people. In the order of preference: DINOv2 sees a subject's details, CLIP and SigLIP rather what it is.
KNOWN = {
    "facebook/dinov2-small": "DINOv2 small",
    "facebook/dinov2-base": "DINOv2 base",
    "facebook/dinov2-large": "DINOv2 large",
    "google/siglip-base-patch16-224": "SigLIP base",
    "openai/clip-vit-base-patch32": "CLIP ViT-B/32",
    "openai/clip-vit-large-patch14": "CLIP ViT-L/14",
}
ABSENT = (
    "Likeness needs an image model, which is not on this machine. Run `.venv/bin/hf download facebook/dinov2-small "
    "config.json model.safetensors preprocessor_config.json` (88 MB), or copy a DINOv2, CLIP or SigLIP model to models/likeness."
)


@dataclass(frozen=True)
class Model:
    """A model on this machine: its folder and its name for people."""

    folder: Path
    name: str


@dataclass(frozen=True)
class Likeness:
    """Scores by the samples' file names. own: the likeness of the training images among themselves; images: how many."""

    model: str = ""
    images: int = 0
    own: float | None = None
    scores: dict[str, float] = field(default_factory=dict)

    def of(self, names: list[str]) -> float | None:
        """The mean score of samples; None where none has one."""
        found = [self.scores[name] for name in names if name in self.scores]
        return sum(found) / len(found) if found else None


def find_model() -> Model | None:
    """The model that computes likeness; None where this machine has none."""
    own = models_dir() / "likeness"
    if (kind := _kind(own)) is not None:
        return Model(own, kind)
    from huggingface_hub import try_to_load_from_cache

    for repo, name in KNOWN.items():
        found = try_to_load_from_cache(repo, "config.json")
        if isinstance(found, str) and _kind(Path(found).parent) is not None:
            return Model(Path(found).parent, name)
    return None


def _kind(folder: Path) -> str | None:
    """The kind of a complete model in a folder, such as "clip"; None for another or an incomplete one."""
    if not all((folder / name).is_file() for name in NEEDED):
        return None
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return kind if kind in KINDS else None


def command(folder: Path, model: Model) -> list[str]:
    """The module and arguments of the process that computes the scores of a run."""
    return [
        "trainer.likeness",
        f"--model={model.folder}",
        f"--name={model.name}",
        f"--images={datasets_dir() / folder.name}",
        f"--samples={folder / 'sample'}",
        f"--output={folder / FILE}",
    ]


def read(folder: Path) -> Likeness:
    """The scores of a run; none where the file is missing or invalid."""
    path = folder / FILE
    try:
        if path.stat().st_size > FILE_BYTES:
            return Likeness()
        values = json.loads(path.read_text(encoding="utf-8"))
        scores = {str(name): float(score) for name, score in values["samples"].items() if _is_score(score)}
        own = float(values["own"]) if _is_score(values["own"]) else None
        return Likeness(str(values["model"])[:200], int(values["images"]), own, scores)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return Likeness()


def _is_score(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and abs(value) <= 1.01
    )
