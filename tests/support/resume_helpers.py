"""Train, kill and resume runs of sd-scripts, and compare the output of two runs."""

from __future__ import annotations

import hashlib
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path

import patches_helpers as helpers
import tiny_sd_scripts as tiny

from guards import checkpoint

DIE = """
import os, signal
left, add = [int(os.environ["DIE_AFTER"])], module.LossRecorder.add
def recorded(self, *, epoch, step, loss):
    add(self, epoch=epoch, step=step, loss=loss)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
module.LossRecorder.add = recorded
"""
"""SIGKILL from inside after that many micro-batches: the test determines the moment, and no cleanup runs."""


def train(
    work: Path,
    out: Path,
    *more: str,
    die_after: int = 0,
    faults: str = "",
    timeout_s: float = 400,
    env=(),
    **changed: str,
):
    """Run one process. Output, losses and metrics accumulate in `out` across attempts. Returns helpers.RunResult."""
    out.mkdir(exist_ok=True)
    settings = {"TINY_LOSSES": str(out / "losses"), "HANGPROOF_RUN": str(out), **dict(env)}
    if die_after:
        (out / "die.py").write_text(DIE)
        settings["DIE_AFTER"] = str(die_after)
        faults = f"{tiny.home('LossRecorder')}={out / 'die.py'};{faults}"
    return helpers.train(
        work, tiny.arguments(work, out / "made", *more, **changed), timeout_s=timeout_s, TINY_FAULTS=faults, **settings
    )


def killed_and_resumed(work: Path, out: Path, *more: str, kills: int, seed: int, **changed: str) -> int:
    """Kill a run as `until_done` does. Returns how often it was killed."""

    def run(die_after: int, *resume: str) -> helpers.RunResult:
        return train(work, out, *more, *resume, die_after=die_after, **changed)

    return until_done(run, out / "made", kills, seed)


def until_done(run: Callable[..., helpers.RunResult], made: Path, kills: int, seed: int) -> int:
    """Kill a run with SIGKILL after a random number of micro-batches, `kills` times, resuming each time from the newest
    state; then let it finish. run(die_after, *resume) is one process; 0: it is not killed. Returns how often it was killed."""
    rng, killed, resume = random.Random(seed), 0, []
    while True:
        result = run(rng.randint(4, 9) if killed < kills else 0, *resume)
        if result.code == 0:
            return killed
        assert result.code == -signal.SIGKILL, result.log[-3000:]
        killed += 1
        newest = checkpoint.newest_valid(made)
        resume = ["--resume", str(newest)] if newest else []


def tensors(path: Path) -> dict[str, str]:
    """Return a digest of each tensor of a safetensors file; its metadata (times, session numbers) is left out."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {name: hashlib.sha256(body[slice(*entry["data_offsets"])]).hexdigest() for name, entry in header.items()}


def samples(out: Path) -> dict[str, set[bytes]]:
    """Return sample images by name without the time. One that was made twice must be identical."""
    found: dict[str, set[bytes]] = {}
    for path in (out / "made/sample").glob("*.png"):
        found.setdefault("_".join(path.stem.split("_")[:3]), set()).add(path.read_bytes())
    return found


def names(out: Path) -> list[str]:
    """Return the names of the states and LoRAs of a run."""
    return sorted(path.name for path in (out / "made").iterdir())


def state_json(out: Path, state: str, name: str) -> dict:
    return json.loads((out / "made" / state / name).read_text())


def learning_rates(out: Path) -> dict[int, float]:
    """Return step → LR, the last entry of each step."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["lr"] for line in lines if line["kind"] == "step"}


def stripped(state: Path, folder: Path, **train_state: int) -> Path:
    """Copy a state as sd-scripts alone writes it, without our files. `train_state` replaces the content of its JSON."""
    import shutil

    copy = Path(shutil.copytree(state, folder / state.name))
    (copy / checkpoint.GUARD).unlink()
    (copy / "hangproof_resume.json").unlink()
    if train_state:
        (copy / "train_state.json").write_text(json.dumps(train_state))
    return copy
