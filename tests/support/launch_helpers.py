"""For the tests of launch: a spec for a rented machine, arguments, every model, trainer and tier, a run in a store."""

import argparse
import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pytest
from families import MODELS, fitting
from runs_helpers import pictures, spec

import presets
import runs
from launch import travel
from launch.common import add_arguments
from launch.store.lease import this_owner

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


def run_with_store(data: Path, name: str, store: str) -> None:
    """A run on this machine whose store the fleet reads."""
    folder = data / "outputs" / name
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(f'name = "{name}"\nstore = "{store}"\n')


def put_run(store: Path, slug: str = "far-cat", **status) -> Path:
    """A run in a store that is a folder, as its agent writes it."""
    folder = store / slug
    folder.mkdir(parents=True)
    at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    values = {"name": "far cat", "state": "running", "step": 40, "planned_steps": 100, "loss": 0.25, "updated_at": at}
    (folder / "status.json").write_text(json.dumps({**values, **status}))
    owner = {**asdict(this_owner()), "host": "far.example"}
    (folder / "lease").mkdir()
    claim = {"number": 1, "owner": owner, "beat": 3, "held": True, "released": False, "period_s": 60}
    (folder / "lease" / "000001.json").write_text(json.dumps(claim))
    return folder
