"""The table of kohya's trainers that are guarded: where each comes from, where it is installed, and what it needs.

The installation and the Doctor read this table; a further trainer is a further row. The commits are the ones that the
project's tests train with. A checkout of another commit works too, as far as `check` says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sd_scripts_patches import compatibility

ROOT = Path(__file__).resolve().parent.parent
TORCH = ("torch==2.13.0", "torchvision==0.28.0")
"""Both trainers leave torch to their user, and sd-scripts imports torchvision without listing it."""
CUDA = "cu130"
CUDA_INDEX = f"https://download.pytorch.org/whl/{CUDA}"
"""PyTorch's own builds for the CUDA version that PyPI has for Linux; for Windows, PyPI has the processor's build alone."""


@dataclass(frozen=True)
class Trainer:
    """One trainer.

    key: its name in ./start.sh and in a run (`backend`). name: as `compatibility` calls it. commit: the pinned one.
    tested: further commits that the tests train with. folder, venv: in the project's folder, unless variables name others.
    extra: what it needs and does not list. python: the oldest and the newest Python it supports. script:
    one of its training scripts, which imports most of it.
    """

    key: str
    name: str
    url: str
    commit: str
    version: str
    tested: tuple[str, ...]
    folder: str
    venv: str
    folder_variable: str
    venv_variable: str
    extra: tuple[str, ...]
    python: tuple[tuple[int, int], tuple[int, int]]
    script: str

    @property
    def checkout(self) -> Path:
        """The folder of its checkout (may not exist)."""
        return Path(os.environ.get(self.folder_variable) or ROOT / self.folder).expanduser().absolute()

    @property
    def environment(self) -> Path:
        """The folder of its virtual environment (may not exist)."""
        return Path(os.environ.get(self.venv_variable) or ROOT / self.venv).expanduser().absolute()


TRAINERS = {
    trainer.key: trainer
    for trainer in (
        Trainer(
            key="sd-scripts",
            name=compatibility.SD_SCRIPTS,
            url="https://github.com/kohya-ss/sd-scripts.git",
            commit="6721028c79ee85a78b3a06dfd8954dae310a1cce",
            version="v0.11.1",
            tested=("48d368fa557731ad0488c07304dfeba8c07910eb", "c162e9039cc3228057b3fc6ae64ce770b87ab9bf"),
            folder="sd-scripts",
            venv=".venv-sd-scripts",
            folder_variable="SD_SCRIPTS_DIR",
            venv_variable="SD_SCRIPTS_VENV",
            extra=TORCH,
            python=((3, 10), (3, 14)),
            script="flux_train_network.py",
        ),
        Trainer(
            key="musubi",
            name=compatibility.MUSUBI,
            url="https://github.com/kohya-ss/musubi-tuner.git",
            commit="30c658c4f4b0bf05038b3346eff9670259b10fc7",
            version="v0.3.4",
            tested=(),
            folder="musubi-tuner",
            venv=".venv-musubi",
            folder_variable="MUSUBI_DIR",
            venv_variable="MUSUBI_VENV",
            extra=(*TORCH, "tensorboard"),
            python=((3, 10), (3, 12)),
            script="zimage_train_network.py",
        ),
    )
}


def of(checkout: Path) -> Trainer | None:
    """Return the trainer that a checkout holds, None when it holds none."""
    found = compatibility.find_checkout(checkout)
    return next((trainer for trainer in TRAINERS.values() if found and trainer.name == found.trainer), None)


def requirements(checkout: Path) -> list[str]:
    """Return what a checkout lists as its requirements, without itself. Raises ValueError when it lists nothing.

    They are in requirements.txt (sd-scripts) or in pyproject.toml (musubi-tuner).
    """
    import tomllib  # not in Python 3.10, which a trainer may have; an installation runs in ours

    listed = checkout / "requirements.txt"
    if listed.is_file():
        return [line for line in listed.read_text(encoding="utf-8").splitlines() if line.strip() != "-e ."]
    try:
        project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
        return [str(entry) for entry in project["project"]["dependencies"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        text = f"{checkout} lists no requirements, neither in requirements.txt nor in pyproject.toml"
        raise ValueError(text) from error
