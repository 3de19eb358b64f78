"""`python -m launch drill` and `./start.sh demo`: a run that freezes in the middle, and what happens then: detection,
reason, kill, restart, end.

It is always a run of its own, with the tiny model and example photos: a real run is never frozen. The freeze comes from
the fault injector of the benchmarks; all else is what any run has, so the drill proves it. The command shows what the
run's monitor says about the freeze; the page shows it as any run, with the incident.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import runs
from guards import loader
from launch.common import report
from monitor.cli.commands import launch as start_monitor
from monitor.process.spawned import ROOT, python
from monitor.run_folder import read_json
from monitor.state import read_status
from runs.examples import TRIGGER, write_examples
from runs.paths import models_dir

NAME = "demo"
# The standby attempt needs a few seconds for its imports: a run that freezes earlier recovers more slowly.
STEPS, FREEZE_AT, SAVE_EVERY = 100, 72, 5
PACE_S = 0.1
SETTINGS: dict[str, Any] = {
    "model": "tiny-flux", "backend": "diffusers", "tier": "16G", "resolution": 64, "mixed_precision": "no",
    "repeats": 1, "max_train_steps": STEPS, "save_every_n_steps": SAVE_EVERY, "sample_every_n_steps": STEPS,
    "trigger": TRIGGER, "prompts": [f"{TRIGGER}, a shiny red ball"], "workers": 1,
}  # fmt: skip
LOAD_LORA = """
import sys
from diffusers import FluxPipeline, FluxTransformer2DModel
model, lora = sys.argv[1:]
transformer = FluxTransformer2DModel.from_pretrained(model, subfolder="transformer")
pipeline = FluxPipeline(None, None, None, None, None, None, transformer)
pipeline.load_lora_weights(lora)
print(len(pipeline.get_list_adapters()["transformer"]))
"""

# event of the monitor -> how it is shown
SHOWN = {"hang": "Detected", "crash": "Crashed", "killed": "Killed", "restarted": "Restarted", "progress": "Trains on"}


def create() -> Path:
    """Create the demo run. What this process starts freezes it: the process that loads the images stops answering, or
    a step never ends, where no such process is forked (Windows, macOS, Python 3.14).

    Raises RunError: it cannot be created.
    """
    forks = loader.rules(SETTINGS["workers"])["num_workers"] and multiprocessing.get_start_method() == "fork"
    spec = runs.make({"name": runs.free_name(NAME), **SETTINGS})
    with tempfile.TemporaryDirectory() as photos:
        write_examples(Path(photos))
        folder: Path = runs.create(spec, Path(photos))
    os.environ |= {
        "HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_FAULT_STEP": str(FREEZE_AT),
        "HANGPROOF_FAULT": "worker_sleeps" if forks else "step_sleeps", "HANGPROOF_PACE_S": f"{PACE_S:g}",
    }  # fmt: skip
    print(f"The demo run trains in {folder}; it freezes at step {FREEZE_AT}.", flush=True)
    return folder


OPTIONS = (("--no-wait", False, "only start it; the page shows the rest"),)


def run(args: argparse.Namespace) -> int:
    """Exit code 0: it finished after one recovery, with a LoRA that diffusers loads (--no-wait: it was started)."""
    began_s, folder = time.monotonic(), create()
    if args.no_wait:
        start_monitor(folder)
        return report(args, "", {"run": folder.name, "folder": str(folder)})
    show(folder)
    status, lora = read_status(folder) or {}, folder / f"{folder.name}.safetensors"
    loads, planned = lora.exists() and loads_in_diffusers(lora), status.get("planned_steps")
    good = loads and (status.get("state"), status.get("restarts"), status.get("step")) == ("completed", 1, planned)
    print(f"LoRA: {lora} ({'diffusers loads it' if loads else 'diffusers cannot load it'})")
    if not good:
        print(f"launch drill: the run ended as {status.get('state')}; read {folder / 'monitor.log'}", file=sys.stderr)
    first = read_json(folder / "incidents" / "0001" / "incident.json") or {}
    values = {
        "run": folder.name, "folder": str(folder), "state": status.get("state"), "steps": status.get("step"),
        "planned_steps": planned, "restarts": status.get("restarts"), "wall_s": round(time.monotonic() - began_s, 1),
        **{name: first.get(name) for name in ("detect_s", "recover_s", "steps_repeated")},
        "lora": str(lora) if lora.exists() else None, "loads_in_diffusers": loads,
    }  # fmt: skip
    report(args, "", values)
    return 0 if good else 1


def show(folder: Path) -> None:
    """Train the demo run, and show what its monitor does. Ctrl-C reaches the monitor."""
    command = python("monitor", "run", str(folder))
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, encoding="utf-8", errors="replace") as monitor:
        for line in monitor.stderr or ():
            kind, _, message = line.partition(" ")[2].partition(": ")
            if kind in SHOWN:
                print(f"{SHOWN[kind]}: {message.rstrip()}", flush=True)


def loads_in_diffusers(lora: Path) -> bool:
    """Whether diffusers alone, without this project's code, loads the LoRA into the tiny model."""
    command = [sys.executable, "-I", "-c", LOAD_LORA, str(models_dir() / "tiny-flux"), str(lora)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return done.returncode == 0 and done.stdout.strip().endswith("1")
