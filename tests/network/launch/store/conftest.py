"""A run, its place in a store, and another machine."""

import json
import os

import pytest
from store_helpers import QUICK, add_state, held, log, make_run
from store_servers import EACH_KIND, Server, serving

from launch.store.copies import Copier
from launch.store.places import Place, open_place
from runs.paths import outputs_dir


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The data root of the first machine."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def run(home, tmp_path):
    """A run with a state, a LoRA of an epoch, logs, a sample and an incident."""
    folder = make_run(tmp_path)
    log(folder, "started")
    add_state(folder, 10)
    (folder / f"{folder.name}-000001.safetensors").write_bytes(os.urandom(5000))
    for name in ("sample/a_000010_00.png", "incidents/0001/report.md", "cache/latent.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(100))
    state = {"version": 2, "state": "running", "attempt": 3, "current": {"root": [1, 2]}}
    (folder / "monitor.json").write_text(json.dumps(state))
    for name in ("training.log", ".hidden", "train.attempt-2.sh", "wandb/x", f"{folder.name}-step00000099-state/half"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("stays on its machine")
    return folder


@pytest.fixture
def place(tmp_path, run) -> Place:
    return open_place(str(tmp_path / "store"), QUICK).under(run.name)


@pytest.fixture
def copier(run, place) -> Copier:
    """Has pushed the run once, and holds its lease."""
    made = Copier(place, run, held(place))
    made.push()
    return made


@pytest.fixture(params=EACH_KIND)
def server(request, tmp_path, monkeypatch):
    """A store of each kind."""
    with serving(request.param, tmp_path, monkeypatch) as one:
        yield one


@pytest.fixture
def other(tmp_path, monkeypatch):
    """Makes this an empty machine: a call sets another data root."""

    def move(name: str = "other"):
        monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / name))
        return outputs_dir()

    return move
