"""For the tests of launch: a spec for a rented machine, a command's arguments, every model, trainer and tier."""

import argparse
from pathlib import Path

import pytest
from families import MODELS, fitting
from runs_helpers import pictures, spec

import presets
import runs
from launch import travel
from launch.common import add_arguments

STORE = "s3://bucket/runs"
OF_EACH_FAMILY = {(presets.models()[key]["family"], backend): (key, backend) for key, backend in MODELS}
CHOICES = [(*choice, tier) for choice in OF_EACH_FAMILY.values() for tier in fitting(*choice)]


@pytest.fixture
def clean(monkeypatch):
    """No settings of this machine."""
    for name in (*travel.STORE_SETTINGS, "HF_HOME", "SKYPILOT_VENV"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """A lease is taken within a moment."""
    (tmp_path / "limits.toml").write_text("allow_below_guards = true\n[store]\nlease_s = 1.5\n")
    monkeypatch.setenv("HANGPROOF_LIMITS", str(tmp_path / "limits.toml"))


def arguments(module, *words: str, command: str = "", **values):
    """What the module's command gets. command: where the module has several."""
    parser = argparse.ArgumentParser(prog=f"launch {command}")
    add_arguments(parser, module)
    given = vars(parser.parse_args(["RUN", *words]))
    return argparse.Namespace(**given | {"json": False, "command": command} | values)


def a_spec(choice=("flux-dev", "diffusers", "20G"), **fields):
    model, backend, tier = choice
    return spec(**{"model": model, "backend": backend, "tier": tier, "store": STORE, **fields})


def a_run(root: Path, **fields) -> Path:
    return runs.create(a_spec(**fields), pictures(root / "photos"))
