"""Shared by the tests of the store: a run with images, logs, a LoRA and complete states, and short limits."""

import os
import time
from pathlib import Path

from runs_helpers import contents, pictures, spec

import runs
from guards import checkpoint
from launch.store.lease import HELD, LOST, RELEASED, Lease
from launch.store.places import Limits, Place

QUICK = Limits(call_s=30.0, tries=8, first_wait_s=0.01, longest_wait_s=0.05)
PERIOD_S = 600.0  # longer than any test


def make_run(tmp_path: Path, **fields) -> Path:
    """A run in the data root of $HANGPROOF_DATA; nothing is trained."""
    return runs.create(spec(**fields), pictures(tmp_path / "its images"))


def add_state(folder: Path, step: int, size: int = 200_000) -> Path:
    """A complete state of this step, with random contents."""
    final = folder / f"{folder.name}-step{step:08}-state"
    with checkpoint.writing(final, step, 1) as work:
        (work / "model.safetensors").write_bytes(os.urandom(size))
        (work / "optimizer.bin").write_bytes(os.urandom(size // 2))
        (work / "train_state.json").write_text(f'{{"current_step": {step}}}')
    return final


def log(folder: Path, text: str) -> None:
    """Append a line to the events and the metrics of a run."""
    for name in ("events.jsonl", "metrics.jsonl"):
        with open(folder / name, "a", encoding="utf-8") as file:
            file.write(f'{{"message": "{text}"}}\n')


def acquired(lease: Lease, limit_s: float = 10) -> bool:
    """Poll until the lease is held (True), or until it is lost or `limit_s` has passed (False)."""
    end = time.monotonic() + limit_s
    while lease.poll() not in (HELD, LOST, RELEASED):
        if time.monotonic() > end:
            return False
        time.sleep(min(1.0, lease.period_s / 30))
    return lease.state == HELD


def held(place: Place, **options) -> Lease:
    """A lease of the place that is held."""
    lease = Lease(place, **{"period_s": PERIOD_S, "settle_s": 0.0 if place.conditional else 0.5, **options})
    assert acquired(lease, 60), (lease.state, lease.holder, lease.error)
    return lease


def belonging(folder: Path) -> dict[str, bytes]:
    """The files that a store has of a run, without those that are rendered again."""
    left = ("train", "wandb", "dataset.toml", "job.json", "monitor.json", f"{folder.name}-step00000099")
    found = contents(folder).items()
    return {name: data for name, data in found if not name.startswith(left) and "/." not in f"/{name}"}
