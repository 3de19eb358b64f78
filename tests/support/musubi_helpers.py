"""Train, kill and resume runs of musubi-tuner, by its own commands and as the project renders them."""

from pathlib import Path

import patches_helpers as helpers
import pytest
import tiny_musubi as tiny
import tomlkit

import runs

SORTED = """
import glob, types
module.glob = types.SimpleNamespace(glob=lambda pattern: sorted(glob.glob(pattern)))
"""
"""musubi-tuner alone trains in the order of the folder's entries, which differs between two copies."""


def train(folder, *more: str, family=tiny.Z_IMAGE, patched=True, die_after=0, env=(), code=0, **changed: str):
    """Run one training process in `folder`, which holds dataset.toml, caches, output, losses and metrics.

    It exits with `code` (a number), unless that is None.
    """
    work = tiny.workdir(family)
    settings = {"TINY_LOSSES": str(folder / "losses"), "TINY_DIE_AFTER": str(die_after), "HANGPROOF_RUN": str(folder)}
    settings |= dict(env)
    if not patched:
        (folder / "sorted.py").write_text(SORTED)
        settings["TINY_FAULTS"] = f"musubi_tuner.dataset.image_video_dataset={folder / 'sorted.py'}"
    line = tiny.arguments(work, folder / "dataset.toml", folder / "made", *more, family=family, **changed)
    command = tiny.command(tiny.trainer(family), *line, patched=patched)
    return helpers.watch(command, tiny.environment(work, patched, **settings), tiny.checkout(), 400, code)


def add_toy_z(data: Path) -> Path:
    """Add the base model "toy-z" to the data root's models.toml: the tiny weights, whose folder is returned."""
    if reason := tiny.why_not():
        pytest.skip(reason)
    work = tiny.workdir()
    data.mkdir(exist_ok=True, parents=True)
    files = dict.fromkeys(("dit", "vae", "text_encoder"), (work / "dit.safetensors").as_posix())
    toy = {"toy-z": {"name": "Toy Z", "family": "z-image", "files": files}}
    (data / "models.toml").write_text(tomlkit.dumps({"models": toy}))
    return work


@pytest.fixture
def toy_z(data, monkeypatch) -> Path:
    """The tiny weights, which are a base model of the data root."""
    monkeypatch.setenv("MUSUBI_DIR", str(tiny.checkout()))
    return add_toy_z(data)


def run_of(work: Path, name: str, **fields) -> Path:
    """A rendered run of 12 steps with a state every 3; its folder."""
    spec = runs.make({
        "name": name, "trigger": "ohwx", "model": "toy-z", "tier": "20G", "resolution": 64, "max_train_steps": 12,
        "repeats": 1, "save_every_n_steps": 3, "save_every_n_epochs": 0, "rank": 4, "workers": 0,
        "extra": {"optimizer_type": "AdamW"}, **fields,
    })  # fmt: skip
    folder = runs.create(spec, work / "images")
    assert runs.problems(runs.load(folder)) == []
    return folder
