"""Every model and trainer, a spec for each, and one model of each family."""

import presets
import runs
from runs.paths import CHECKOUTS

PLATFORMS = ("linux", "win32", "darwin")
MODELS = [(key, backend) for key, model in presets.models().items() for backend in model["backends"]]
BY_FILE = [(key, backend) for key, backend in MODELS if backend in CHECKOUTS]
# One model of each family and trainer: the others differ in their files.
FAMILIES = list({(presets.models()[key]["family"], backend): (key, backend) for key, backend in BY_FILE}.values())


def fitting(model: str, backend: str) -> list[str]:
    """The tiers that can hold a model."""
    return [name for name, row in presets.tiers_of(model, backend).items() if not row["problem"]]


def made(model: str, backend: str, tier: str, **fields) -> "runs.RunSpec":
    sampling = {"prompts": ["a cat"], "sample_every_n_steps": 50, "save_every_n_steps": 100}
    return runs.make({"name": "My it's run", "model": model, "backend": backend, "tier": tier, **sampling, **fields})
