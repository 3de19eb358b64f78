"""Shared by the tests of rehearsal and drill: a tiny run, what is on the disk, what still runs."""

import json
from pathlib import Path

import pytest
from monitor_helpers import wait_for
from queue_helpers import processes
from runs_helpers import picture, python

import runs

TINY = {
    "model": "tiny-flux", "backend": "diffusers", "tier": "16G", "resolution": 64, "mixed_precision": "no",
    "workers": 0, "trigger": "ohwx", "prompts": ["ohwx, a ball"], "sample_steps": 1, "rank": 4,
    "sample_every_n_steps": None,
}  # fmt: skip


@pytest.fixture
def one_cpu(monkeypatch):
    """No GPU, and one thread: a tiny model is slower with several."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def tiny_run(data: Path, **fields) -> Path:
    """A run of the tiny model with three images; its folder."""
    pictures = data.parent / "pictures"
    for number in range(3):
        picture(pictures / f"photo{number:03d}.png", (96, 64 if number % 2 else 96))
    return runs.create(runs.make({"name": "tiny", **TINY, **fields}), pictures)


def nothing_runs(data: Path) -> bool:
    """Whether no process of this data folder is alive, within some seconds."""
    return bool(wait_for(lambda: not processes(data), 15, "the end of its processes"))


def launched(tool: str, folder: Path | str, *words: str, **environment: str) -> tuple[int, dict, str]:
    """`python -m launch TOOL FOLDER --json WORDS`: the exit code, what its last line says, and all of its output."""
    done = python("-m", "launch", tool, str(folder), "--json", *words, timeout=500, **environment)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def states(found: dict) -> dict[str, str]:
    """The stages of a rehearsal, and how far each came."""
    return {stage["key"]: stage["state"] for stage in found["stages"]}
