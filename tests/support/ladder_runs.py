"""A run of the tiny model whose trainer is a toy behind `$TRAINER_PYTHON`: the real specs, scripts and monitor, and no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from monitor_helpers import finish, monitor, toy
from runs_helpers import executable, pictures
from toys import fault_at

import runs

# What accelerate would start: it fails as the trainer's flags say it must.
TRAINER = toy(fault_at(25, 'exec(os.environ.get("TOY_FAULT", ""))', "True"), steps=40, pace=0.02, every=10)
CRASHES = (
    "allow_below_guards = true\n[end]\ngrace_s = 0.5\n[restart]\nbackoff_first_s = 0.1\n[phases.step]\nfloor_s = 30\n"
)
HANGS = "allow_below_guards = true\n[end]\ngrace_s = 0.5\n[restart]\nbackoff_first_s = 0.1\n" + "".join(
    f"[phases.{name}]\nfloor_s = 1\nceiling_s = 2\n" for name in ("load", "sample", "validate", "save", "end")
)
FORK = """
if args.max_data_loader_n_workers:
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use spawn")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, int]]:
    """f(fault, limits, **spec) makes a run of 40 steps, runs its monitor to the end, and returns (folder, exit code)."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    (tmp_path / "trainer.py").write_text(TRAINER)
    text = f'#!/bin/sh\nexec {sys.executable} {tmp_path}/trainer.py "$@"\n'
    program = executable(tmp_path / "accelerate", text)
    pictures(tmp_path / "photos", 1)

    def made(fault: str, limits: str = CRASHES, **spec) -> tuple:
        values = {"name": "Ladder 1", "trigger": "t", "model": "tiny-flux", "backend": "diffusers"}
        monkeypatch.setenv("TRAINER_PYTHON", str(program))
        # The toy takes sd-scripts' flags too; which backend has which needs its checkout.
        monkeypatch.setattr("runs.flags.check_extra", lambda spec: None)
        folder = runs.create(runs.make({**values, "max_train_steps": 40, **spec}), tmp_path / "photos")
        (tmp_path / "limits.toml").write_text(limits)
        env = {"HANGPROOF_DATA": str(tmp_path), "TRAINER_PYTHON": str(program), "TOY_FAULT": fault}
        env["HANGPROOF_LIMITS"] = str(tmp_path / "limits.toml")
        return folder, finish(monitor(folder, **env))[0]

    return made
