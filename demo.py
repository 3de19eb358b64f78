"""The promise on one screen: a tiny real LoRA run, a hang put in on purpose, recovery, a file that loads elsewhere.

    ./start.sh demo [--json]

Decision: nothing in it is special. The run is made by `python -m runs new`, supervised by `python -m monitor run`, trained
by the embedded trainer on a tiny random FLUX; only the hang comes from the fault injector that the benchmarks use. The LoRA
is then loaded by diffusers alone. Exit code 0 when the run completed after one restart, with every planned step and a LoRA
that loads; otherwise 1, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from runs.paths import ROOT, outputs_dir

NAME = "demo"
STEPS = 40
HANG_AT = 22
SAVE_EVERY = 5
PACE_S = 0.1

LOADS = """
import sys, torch
from diffusers import FluxPipeline, FluxTransformer2DModel
model, lora = sys.argv[1:]
transformer = FluxTransformer2DModel.from_pretrained(model, subfolder="transformer")
pipeline = FluxPipeline(None, None, None, None, None, None, transformer)
pipeline.load_lora_weights(lora)
print(len(pipeline.get_list_adapters()["transformer"]))
"""


def say(text: str) -> None:
    """A line for the person watching; on standard error, so that standard output can end in JSON."""
    print(text, file=sys.stderr, flush=True)


def make_photos(folder: Path, count: int = 6) -> None:
    """`count` small pictures of a coloured disc before a gradient, each with a caption: a data set from nothing."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    rows, columns = np.mgrid[0:96, 0:96] / 95
    for i in range(count):
        disc = (rows - 0.3 - 0.07 * i) ** 2 + (columns - 0.5) ** 2 < 0.06
        picture = np.stack([rows, columns, np.full_like(rows, i / count)], axis=-1)
        picture[disc] = (1.0, 0.2 * (i % 5), 0.1)
        Image.fromarray((picture * 255).astype("uint8")).save(folder / f"disc-{i}.png")
        (folder / f"disc-{i}.txt").write_text(f"d1sc, a red disc number {i}", encoding="utf-8")


def free_name() -> str:
    """`demo`, or `demo-2`, … where an earlier demo was kept."""
    number = 1
    while (outputs_dir() / (name := NAME if number == 1 else f"{NAME}-{number}")).exists():
        number += 1
    return name


def new_run(photos: Path) -> Path:
    """The run's folder, made by the same command that a person would use."""
    settings = {
        "max_train_steps": STEPS,
        "save_every_n_steps": SAVE_EVERY,
        "resolution": 64,
        "mixed_precision": "no",
        "sample_every_n_steps": STEPS,
        "repeats": 1,
    }
    command = [sys.executable, "-m", "runs", "new", "--name", free_name(), "--images", str(photos), "--trigger", "d1sc"]
    command += [
        "--model",
        "tiny-flux",
        "--tier",
        "16G",
        "--backend",
        "diffusers",
        "--prompt",
        "d1sc, a red disc",
        "--json",
    ]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode:
        raise SystemExit("demo: the run could not be made, see above")
    return Path(json.loads(made.stdout.splitlines()[-1])["folder"])


def supervise(folder: Path) -> int:
    """Run the monitor in the foreground, with the hang to come; its exit code. What it says goes to standard error."""
    environment = {
        **os.environ,
        "HANGPROOF_INJECT": "benchmarks.injector:fire",
        "HANGPROOF_FAULT": "step_sleeps",
        "HANGPROOF_FAULT_STEP": str(HANG_AT),
        "HANGPROOF_PACE_S": str(PACE_S),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "monitor", "run", str(folder)], cwd=ROOT, env=environment, stdout=sys.stderr
    )
    return process.wait()


def loads_in_diffusers(lora: Path, model: Path) -> bool:
    """Whether diffusers, with nothing of ours, loads the LoRA into the model's transformer."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOADS, str(model), str(lora)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        say(done.stderr[-2000:])
    return done.returncode == 0 and done.stdout.strip().endswith("1")


def summary(folder: Path, wall_s: float, model: Path) -> dict:
    """What happened, from the run's own files."""
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    incidents = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("incidents/*/incident.json"))]
    lora = folder / f"{folder.name}.safetensors"
    first = incidents[0] if incidents else {}
    return {
        "state": status["state"],
        "planned_steps": status["planned_steps"],
        "steps": status["step"],
        "restarts": status["restarts"],
        "detect_s": first.get("detect_s"),
        "recover_s": first.get("recover_s"),
        "wall_s": round(wall_s, 1),
        "lora": str(lora) if lora.exists() else None,
        "loads_in_diffusers": lora.exists() and loads_in_diffusers(lora, model),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the demo. `--json`: the last line of standard output is the summary as one JSON object."""
    parser = argparse.ArgumentParser(prog="./start.sh demo", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end standard output with one line of JSON")
    arguments = parser.parse_args(argv)
    from runs.paths import models_dir

    started = time.monotonic()
    photos = outputs_dir().parent / f".demo-photos-{os.getpid()}"
    try:
        make_photos(photos)
        folder = new_run(photos)
    finally:
        shutil.rmtree(photos, ignore_errors=True)
    say(f"A run of {STEPS} steps in {folder}, with a hang put in at step {HANG_AT}:")
    supervise(folder)
    result = summary(folder, time.monotonic() - started, models_dir() / "tiny-flux")
    good = (
        result["state"] == "completed"
        and result["restarts"] == 1
        and result["steps"] == result["planned_steps"]
        and result["loads_in_diffusers"]
    )
    if good:
        say(
            f"Completed: the hang was seen after {result['detect_s']:.1f} s, training went on {result['recover_s']:.1f} s "
            f"after it, and every one of {result['steps']} steps was trained.\nThe LoRA: {result['lora']}\n"
            f"What happened, in words: {folder / 'incidents' / '0001' / 'report.md'}"
        )
    else:
        say(
            f"demo: this is not what should happen: {result}\nSee {folder / 'monitor.log'} and {folder / 'training.log'}"
        )
    if arguments.json:
        print(json.dumps(result), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
