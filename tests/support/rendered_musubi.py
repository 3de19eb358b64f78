"""Runs of musubi-tuner as the project renders them, on tiny weights."""

from pathlib import Path

import tiny_musubi as tiny

import runs


def run_of(work: Path, name: str, **fields) -> Path:
    """A rendered run of 12 steps with a state every 3; its folder."""
    spec = runs.make({
        "name": name, "trigger": "ohwx", "model": "toy-z", "tier": "20G", "resolution": 64, "max_train_steps": 12, "repeats": 1,
        "save_every_n_steps": 3, "save_every_n_epochs": 0, "rank": 4, "workers": 0, "extra": {"optimizer_type": "AdamW"}, **fields,
    })  # fmt: skip
    folder = runs.create(spec, work / "images")
    assert runs.problems(runs.load(folder)) == []
    return folder


def environment(work: Path, data: Path, **more: str) -> dict[str, str]:
    return tiny.environment(work, HANGPROOF_DATA=str(data), **more)


def caches(folder: Path, kind: str) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "cache").glob(f"*{kind}.safetensors")}
