"""A run of the tiny model whose trainer is a toy behind `$TRAINER_PYTHON`: the real specs, scripts and monitor, and no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from monitor_helpers import ROOT, finish, monitor
from runs_helpers import executable, pictures

# What accelerate would start: it takes the trainer's arguments and fails as the flags say it must.
TRAINER = f"""
import argparse, json, os, signal, struct, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from guards import checkpoint, crash
from guards.heartbeat import Heartbeat, REQUEST_STOP
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--output_dir", type=Path)
parser.add_argument("--output_name")
parser.add_argument("--resume", type=Path)
parser.add_argument("--max_data_loader_n_workers", type=int, default=0)
parser.add_argument("--optimizer_type", default="")
args, rest = parser.parse_known_args()
hb = Heartbeat.from_env()
crash.install(hb)
hb.phase("load")
step = checkpoint.guard_of(args.resume)["step"] if args.resume else 0
hb.plan(40)
hb.phase("first_step")
while step < 40:
    time.sleep(0.02)
    step += 1
    hb.step(step)
    if step % 10 == 0:
        hb.phase("save")
        with checkpoint.writing(args.output_dir / f"{{args.output_name}}-step{{step:08d}}-state", step, 1) as folder:
            (folder / "optimizer.txt").write_text(args.optimizer_type)
        hb.phase("step")
    if hb.request == REQUEST_STOP:
        hb.end("stopped")
        crash.exit_now(3)
    if step == 25:
        exec(os.environ.get("TOY_FAULT", ""))
weight = {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
header = json.dumps({{"__metadata__": {{"optimizer": args.optimizer_type}}, "weight": weight}}).encode()
lora = args.output_dir / f"{{args.output_name}}.safetensors"
checkpoint.atomic_write(lora, struct.pack("<Q", len(header)) + header + bytes(4))
hb.end("done")
crash.exit_now(0)
"""


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


def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, int]]:
    """Return f(fault, limits, **spec), which makes a run of 40 steps, runs its monitor, and returns (folder, exit code)."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    (tmp_path / "trainer.py").write_text(TRAINER)
    text = f'#!/bin/sh\nexec {sys.executable} {tmp_path}/trainer.py "$@"\n'
    program = executable(tmp_path / "accelerate", text)
    pictures(tmp_path / "photos", 1)
    import runs

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
