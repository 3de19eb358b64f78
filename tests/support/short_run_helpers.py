"""Shared by the tests of rehearsal, ladder and drill: a tiny run, what is on the disk, what still runs."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from runs_helpers import picture

import runs

TINY = {
    "model": "tiny-flux", "backend": "diffusers", "tier": "16G", "resolution": 64, "mixed_precision": "no", "workers": 0,
    "trigger": "ohwx", "prompts": ["ohwx, a ball"], "sample_steps": 1, "rank": 4,
    "sample_every_n_steps": None,
}  # fmt: skip


def tiny_run(data: Path, images: int = 3, **fields) -> Path:
    """A run of the tiny model with so many images; its folder."""
    pictures = data.parent / "pictures"
    for number in range(images):
        picture(pictures / f"photo{number:03d}.png", (96, 64 if number % 2 else 96))
    return runs.create(runs.make({"name": "tiny", **TINY, **fields}), pictures)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def settled(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.1)


def nothing_runs(data: Path) -> bool:
    """Whether no process of this data folder is alive, within some seconds."""
    end = time.monotonic() + 15
    while time.monotonic() < end:
        if not any(_uses(process, data) for process in psutil.process_iter() if process.pid != os.getpid()):
            return True
        time.sleep(0.1)
    return False


def _uses(process: psutil.Process, data: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        inside = str(data)
        environment = process.environ()
        return any(environment.get(name, "").startswith(inside) for name in ("HANGPROOF_DATA", "HANGPROOF_RUN"))
    return False


@pytest.fixture
def one_cpu(monkeypatch):
    """No GPU, and one thread: a tiny model is slower with several."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
