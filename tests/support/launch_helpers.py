"""Shared by the tests of launch: a spec for a rented machine, a command's arguments, every choice of model, trainer and tier."""

import argparse
from pathlib import Path

from runs_helpers import pictures, spec

import presets
import runs

STORE = "s3://bucket/runs"
# One model of each family.
MODELS = {entry["family"]: model for model, entry in presets.models().items()}.values()
CHOICES = [
    (model, backend, tier)
    for model in MODELS
    for backend in presets.models()[model]["backends"]
    for tier, row in presets.tiers_of(model, backend).items()
    if not row["problem"]
]


def arguments(module, *words: str):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(["RUN", *words])


def a_spec(choice=("flux-dev", "diffusers", "20G"), **fields):
    model, backend, tier = choice
    return spec(**{"model": model, "backend": backend, "tier": tier, "store": STORE, **fields})


def a_run(root: Path, **fields) -> Path:
    return runs.create(a_spec(**fields), pictures(root / "photos"))
