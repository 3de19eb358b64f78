"""Trains a tiny LoRA, injects a hang, and shows the recovery.

    ./start.sh demo [--json] [--compare]

`--compare` trains a second time without the standby attempt and without snapshots in memory, and prints both side by side.

The demo uses the same parts as any run, so that it proves them: `python -m runs new` creates the run, `python -m monitor run`
supervises it, and the built-in trainer trains it on a tiny random FLUX model. Only the hang is artificial; it comes from the
fault injector of the benchmarks. At the end, diffusers loads the LoRA without any of this project's code.

Exit code 0 when the run completed after one restart, with every planned step and a LoRA that loads; else 1 with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from runs.examples import TRIGGER, write_examples
from runs.paths import ROOT, datasets_dir, outputs_dir

NAME = "demo"
STEPS = 100
HANG_AT = 72  # a run that is under way: the standby attempt needs a few seconds to import what it needs
SAVE_EVERY = 5
PACE_S = 0.1
WITHOUT = "standby = false\n[restart]\nsnapshots_bytes = 0\n"

LOAD_LORA = """
import sys, torch
from diffusers import FluxPipeline, FluxTransformer2DModel
model, lora = sys.argv[1:]
transformer = FluxTransformer2DModel.from_pretrained(model, subfolder="transformer")
pipeline = FluxPipeline(None, None, None, None, None, None, transformer)
pipeline.load_lora_weights(lora)
print(len(pipeline.get_list_adapters()["transformer"]))
"""


def say(text: str) -> None:
    """Print one line for the user to standard error, because standard output ends in JSON."""
    print(text, file=sys.stderr, flush=True)


def free_name() -> str:
    """`demo`, or the first of `demo-2`, `demo-3`, … that no run and no data set uses."""
    number, name = 1, NAME
    while (outputs_dir() / name).exists() or (datasets_dir() / name).exists():
        number += 1
        name = f"{NAME}-{number}"
    return name


def new_run(photos: Path) -> Path:
    """Create the run with the command that a user types. Returns its folder."""
    settings = {
        "max_train_steps": STEPS,
        "save_every_n_steps": SAVE_EVERY,
        "resolution": 64,
        "mixed_precision": "no",
        "sample_every_n_steps": STEPS,
        "repeats": 1,
    }
    command = [
        sys.executable,
        "-m",
        "runs",
        "new",
        "--name",
        free_name(),
        "--images",
        str(photos),
        "--trigger",
        TRIGGER,
    ]
    command += [
        "--model",
        "tiny-flux",
        "--tier",
        "16G",
        "--backend",
        "diffusers",
        "--prompt",
        f"{TRIGGER}, a shiny red ball",
        "--json",
    ]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode:
        raise SystemExit("demo: the run could not be created; see the message above")
    return Path(json.loads(made.stdout.splitlines()[-1])["folder"])


def supervise(folder: Path, limits: Path | None = None) -> int:
    """Run the monitor in the foreground with the hang configured. Its output goes to standard error. Returns its exit code.

    limits: a file that replaces some of the monitor's limits.
    """
    environment = {
        **os.environ,
        "HANGPROOF_INJECT": "benchmarks.injector:fire",
        "HANGPROOF_FAULT": "step_sleeps",
        "HANGPROOF_FAULT_STEP": str(HANG_AT),
        "HANGPROOF_PACE_S": str(PACE_S),
        **({"HANGPROOF_LIMITS": str(limits)} if limits else {}),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "monitor", "run", str(folder)], cwd=ROOT, env=environment, stdout=sys.stderr
    )
    return process.wait()


def loads_in_diffusers(lora: Path, model: Path) -> bool:
    """Whether diffusers alone loads the LoRA into the model's transformer."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOAD_LORA, str(model), str(lora)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        say(done.stderr[-2000:])
    return done.returncode == 0 and done.stdout.strip().endswith("1")


def read_incidents(folder: Path) -> list[dict[str, Any]]:
    """The run's incidents, oldest first."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("incidents/*/incident.json"))]


def summary(folder: Path, wall_s: float, model: Path) -> dict[str, Any]:
    """The result, read from the run's files."""
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    incidents = read_incidents(folder)
    lora = folder / f"{folder.name}.safetensors"
    first = incidents[0] if incidents else {}
    return {
        "state": status["state"],
        "planned_steps": status["planned_steps"],
        "steps": status["step"],
        "restarts": status["restarts"],
        "detect_s": first.get("detect_s"),
        "recover_s": first.get("recover_s"),
        "steps_repeated": first.get("steps_repeated"),
        "wall_s": round(wall_s, 1),
        "lora": str(lora) if lora.exists() else None,
        "loads_in_diffusers": lora.exists() and loads_in_diffusers(lora, model),
    }


def story(result: dict[str, Any], incidents: list[dict[str, Any]]) -> list[str]:
    """The result in sentences, one a line."""
    lines = [] if incidents else ["No hang was detected"]
    for incident in incidents:
        detect_s, recover_s = incident.get("detect_s"), incident.get("recover_s")
        if incident.get("kind") == "hang" and detect_s is not None:
            lines.append(f"Hang detected after {detect_s:.1f} s")
        else:
            lines.append("Crashed")
        lines.append("Not recovered" if recover_s is None else f"Recovered in {recover_s:.1f} s")
    lines.append(f"{str(result['state']).capitalize()}: {result['steps']} of {result['planned_steps']} steps trained")
    if result["lora"]:
        loads = "diffusers loads it" if result["loads_in_diffusers"] else "diffusers cannot load it"
        lines.append(f"LoRA: {result['lora']} ({loads})")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Run the demo. With --json, the last line of standard output is the summary as one JSON object."""
    parser = argparse.ArgumentParser(prog="./start.sh demo", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--compare", action="store_true", help="train again without standby attempt and snapshots")
    arguments = parser.parse_args(argv)
    good, result = one_run()
    if arguments.compare:
        with tempfile.TemporaryDirectory() as folder:
            limits = Path(folder) / "limits.toml"
            limits.write_text(WITHOUT, encoding="utf-8")
            good_without, without = one_run(limits)
        good, result = good and good_without, {**result, "without": without}
        for line in side_by_side(result, without):
            say(line)
    if arguments.json:
        print(json.dumps(result), flush=True)
    return 0 if good else 1


def side_by_side(result: dict[str, Any], without: dict[str, Any]) -> list[str]:
    """Both runs of --compare as a table."""
    lines = [f"{'':<42}{'recovered in':>14}{'steps repeated':>16}"]
    for name, one in (("with standby attempt and snapshots", result), ("without both", without)):
        recover_s = "-" if one["recover_s"] is None else f"{one['recover_s']:.1f} s"
        lines.append(
            f"{name:<42}{recover_s:>14}{one['steps_repeated'] if one['steps_repeated'] is not None else '-':>16}"
        )
    return lines


def one_run(limits: Path | None = None) -> tuple[bool, dict[str, Any]]:
    """One run with its hang; whether all of it went well, and its result."""
    from runs.paths import models_dir

    started = time.monotonic()
    photos = outputs_dir().parent / f".demo-photos-{os.getpid()}"
    try:
        write_examples(photos)
        folder = new_run(photos)
    finally:
        shutil.rmtree(photos, ignore_errors=True)
    say(f"Training {STEPS} steps in {folder}. A hang will be injected at step {HANG_AT}.")
    supervise(folder, limits)
    result = summary(folder, time.monotonic() - started, models_dir() / "tiny-flux")
    good = (
        result["state"] == "completed"
        and result["restarts"] == 1
        and result["steps"] == result["planned_steps"]
        and result["loads_in_diffusers"]
    )
    incidents = read_incidents(folder)
    for line in story(result, incidents):
        say(line)
    if incidents:
        say(f"Report: {folder / 'incidents' / '0001' / 'report.md'}")
    if not good:
        say(f"demo: failed; read {folder / 'monitor.log'} and {folder / 'training.log'}")
    return good, result


if __name__ == "__main__":
    raise SystemExit(main())
