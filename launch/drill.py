"""`python -m launch drill` and `./start.sh demo`: a run that freezes in the middle, and what happens then: detection, reason, kill,
restart, end.

It is always a run of its own, with the tiny model and example photos: a real run is never frozen. The freeze comes from the fault
injector of the benchmarks; all else is what any run has, so the drill proves it. `drill.json` in the run's folder marks it, and
`stages` reads from the run's files what has happened so far, so the page shows it live and needs no process of its own.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import runs
from launch.common import LaunchError, report
from monitor.cli.commands import ask_to_end
from monitor.cli.commands import launch as start_monitor
from monitor.run_folder import EVENTS, read_json
from monitor.state import FINAL, State, read_status
from runs.examples import TRIGGER, write_examples
from runs.files import atomic_write
from runs.paths import models_dir

FILE = "drill.json"
NAME = "demo"
# The standby attempt needs a few seconds to import what it needs: a run that freezes earlier recovers more slowly.
STEPS, FREEZE_AT, SAVE_EVERY = 100, 72, 5
PACE_S = 0.1
WAIT_S = 600.0
WITHOUT = "standby = false\n[restart]\nsnapshots_bytes = 0\n"  # the limits of the second run of --compare
SETTINGS: dict[str, Any] = {
    "model": "tiny-flux", "backend": "diffusers", "tier": "16G", "resolution": 64, "mixed_precision": "no", "repeats": 1,
    "max_train_steps": STEPS, "save_every_n_steps": SAVE_EVERY, "sample_every_n_steps": STEPS, "trigger": TRIGGER,
    "prompts": [f"{TRIGGER}, a shiny red ball"], "workers": 1,
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


@dataclass(frozen=True)
class Fault:
    """A way to freeze. fault: of benchmarks/injector.py. label: of the choice. text: what happens in the trainer."""

    fault: str
    label: str
    text: str


FAULTS = {
    "step": Fault(
        "step_sleeps", "A step never ends", "The trainer sleeps in the middle of a step, for ever.",
    ),
    "worker": Fault(
        "worker_sleeps", "A data loader worker never answers",
        "The process that loads the images has stopped answering. The trainer waits for its next image, for ever.",
    ),
    "stopped": Fault(
        "sigstop", "The trainer is stopped", "A signal has stopped the trainer in the middle of a step. It would wait for ever.",
    ),
    "deadlock": Fault(
        "lock_deadlock", "Two threads wait for each other",
        "Two threads of the trainer wait for a lock that the other one holds. Neither will ever get it.",
    ),
}  # fmt: skip
USUAL = "worker"
COMPARED = "The monitor knows how long a step of this run takes, and compares."
DETECTED = "No step was completed for much longer than steps of this run take, and no process does any work."
EXPLAINED = "The monitor collects the stack of every thread and names the likely cause."
LATER = (  # stages after the detection: key, title, the event that proves it, and the text before that
    ("kill", "Killed", "killed", "The stuck processes are killed, with all that they started."),
    ("restart", "Restarted", "restarted", "The run starts again from its newest checkpoint that verifies."),
    ("recover", "Trains on", "progress", "The first step that was not trained before."),
)


@dataclass
class Stage:
    """One stage of the drill. at_s: seconds since the freeze, None before and where not known.

    state: waiting, running, done, or skipped (the run ended without it).
    """

    key: str
    title: str
    text: str
    state: str = "waiting"
    at_s: float | None = None


def start(kind: str = USUAL) -> Path:
    """Create the demo run, and start it with the freeze in it. Changes the environment of this process.

    Returns:
        The run's folder; it trains in the background.

    Raises LaunchError: there is no such kind. RunError: it cannot be created. MonitorError: it cannot be started.
    """
    if kind not in FAULTS:
        raise LaunchError(f"there is no drill {kind!r}; use {', '.join(FAULTS)}")
    spec = runs.make({"name": runs.free_name(NAME), **SETTINGS})
    with tempfile.TemporaryDirectory() as photos:
        write_examples(Path(photos))
        folder: Path = runs.create(spec, Path(photos))
    atomic_write(folder / FILE, json.dumps({"kind": kind, "freeze_at": FREEZE_AT, "steps": STEPS}))
    os.environ |= {
        "HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_FAULT": FAULTS[kind].fault,
        "HANGPROOF_FAULT_STEP": str(FREEZE_AT), "HANGPROOF_PACE_S": f"{PACE_S:g}",
    }  # fmt: skip
    start_monitor(folder)
    return folder


def stages(folder: Path) -> list[Stage]:
    """The stages of the drill in `folder` as its files tell them now; [] for a run that is no drill."""
    fault = FAULTS.get(str((read_json(folder / FILE) or {}).get("kind")))
    if fault is None:
        return []
    status, events = read_status(folder) or {}, _events(folder)
    hang = next((e for e in events if e["kind"] in ("hang", "crash")), {})
    hang_s = _number(hang)
    # The detection says how long before it the last progress was.
    froze_s = None if hang_s is None else hang_s - (_number(hang, "since_s") or 0.0)
    incident = read_json(folder / "incidents" / "0001" / "incident.json") or {}
    ended, completed = status.get("state") in FINAL, status.get("state") == State.COMPLETED
    # The first attempt freezes. Paused before that and resumed, the drill trains to its end.
    frozen = bool(hang) or (
        not completed and int(status.get("step") or 0) >= FREEZE_AT and int(status.get("attempt") or 1) == 1
    )
    explained = str(incident.get("explanation") or hang.get("message") or EXPLAINED)
    saved = f"The tiny model trains {STEPS} steps and saves a checkpoint every {SAVE_EVERY}."
    result = str(status.get("reason") or status.get("message") or status.get("state"))
    found = [
        _stage("train", "Training", saved, True),
        _stage(
            "freeze", f"Frozen at step {hang.get('step') or FREEZE_AT}", fault.text, frozen, 0.0 if frozen else None
        ),
        _stage("detect", "Detected", DETECTED if hang else COMPARED, bool(hang), _since(hang, froze_s)),
        _stage("explain", "Explained", explained, bool(incident), _since(hang, froze_s)),
    ]
    for key, title, kind, text in LATER:
        event = next(
            (e for e in events if e["kind"] == kind and hang_s is not None and (_number(e) or 0.0) >= hang_s), {}
        )
        text = f"{str(event.get('message', '')).capitalize()}." if event else text
        found.append(_stage(key, title, text, bool(event), _since(event, froze_s)))
    title = "Finished" if completed or not ended else "Ended"
    found.append(
        _stage("end", title, result if ended else f"All {STEPS} steps are trained and the LoRA verifies.", ended)
    )
    # A stage that is reached proves those before it; the end does not: a drill can be stopped before it freezes.
    reached = max((n for n, stage in enumerate(found[:-1]) if stage.state == "done"), default=0)
    for stage in found[:reached]:
        stage.state = "done"
    for stage in found if ended else ():
        stage.state = "skipped" if stage.state == "waiting" else stage.state
    if not ended:
        found[reached + 1 if reached else 0].state = "running"
    return found


def times(folder: Path) -> dict[str, float]:
    """Seconds that were measured, by name, as far as they are known: detected, killed, restarted, recovered (since the freeze)."""
    names = {"detect": "detected", "kill": "killed", "restart": "restarted", "recover": "recovered"}
    found = ((names.get(stage.key), stage.at_s) for stage in stages(folder))
    return {name: round(at_s, 1) for name, at_s in found if name and at_s is not None}


def _stage(key: str, title: str, text: str, done: bool, at_s: float | None = None) -> Stage:
    return Stage(key, title, text, "done" if done else "waiting", at_s)


def _events(folder: Path) -> list[dict[str, Any]]:
    """The events of a run; a line that is not one, as the last one of a killed monitor, is left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in (folder / EVENTS).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [value for value in found if isinstance(value, dict) and "kind" in value]


def _number(event: Mapping[str, Any], key: str = "mono_s") -> float | None:
    value = event.get(key)
    return float(value) if isinstance(value, int | float) else None


def _since(event: Mapping[str, Any], froze_s: float | None) -> float | None:
    at_s = _number(event)
    return None if at_s is None or froze_s is None else max(0.0, at_s - froze_s)


# The command ------------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m launch drill`."""
    parser.add_argument("--kind", choices=list(FAULTS), default=USUAL, help=f"what freezes (default: {USUAL})")
    parser.add_argument("--no-wait", action="store_true", help="only start it; the page shows the rest")
    parser.add_argument("--compare", action="store_true", help="again without standby attempt and snapshots in memory")


def run(args: argparse.Namespace) -> int:
    """Exit code 0: it finished after one recovery, with a LoRA that diffusers loads (with --no-wait: it was started)."""
    if args.no_wait:
        folder = start(args.kind)
        print(f"The demo run trains in {folder}; it freezes at step {FREEZE_AT}.", flush=True)
        return report(args, "", {"run": folder.name, "folder": str(folder)})
    good, answer = drill(args.kind)
    if args.compare:
        with tempfile.TemporaryDirectory() as there:
            limits = Path(there) / "limits.toml"
            limits.write_text(WITHOUT, encoding="utf-8")
            os.environ["HANGPROOF_LIMITS"] = str(limits)
            good_without, without = drill(args.kind)
        good, answer = good and good_without, {**answer, "without": without}
        print(f"{'':<42}{'recovered in':>14}{'steps repeated':>16}")
        for name, one in (("with standby attempt and snapshots", answer), ("without both", without)):
            recovered = "-" if one["recover_s"] is None else f"{one['recover_s']:.1f} s"
            print(f"{name:<42}{recovered:>14}{one['steps_repeated'] or 0:>16}")
    report(args, "", answer)
    return 0 if good else 1


def drill(kind: str) -> tuple[bool, dict[str, Any]]:
    """Start a drill and show its stages until it ends: whether all went well, and what happened. Ctrl-C stops the run."""
    began_s, folder = time.monotonic(), start(kind)
    print(f"The demo run trains in {folder}; it freezes at step {FREEZE_AT}.", flush=True)
    shown = set[str]()
    try:
        while time.monotonic() - began_s < WAIT_S:
            ended = (read_status(folder) or {}).get("state") in FINAL
            for stage in stages(folder):
                if stage.state == "done" and stage.key not in shown:
                    shown.add(stage.key)
                    after = f" ({stage.at_s:.1f} s after the freeze)" if stage.at_s else ""
                    print(f"{stage.title}{after}: {stage.text}", flush=True)
            if ended:
                break
            time.sleep(0.25)
    except KeyboardInterrupt:
        ask_to_end(folder, {"now": True})
        raise
    answer = summary(folder, time.monotonic() - began_s)
    good = answer["state"] == "completed" and answer["restarts"] == 1 and answer["steps"] == answer["planned_steps"]
    if answer["lora"]:
        loads = "diffusers loads it" if answer["loads_in_diffusers"] else "diffusers cannot load it"
        print(f"LoRA: {answer['lora']} ({loads})")
    if not good or not answer["loads_in_diffusers"]:
        print(f"launch drill: the run ended as {answer['state']}; read {folder / 'monitor.log'}", file=sys.stderr)
    return good and answer["loads_in_diffusers"], answer


def summary(folder: Path, wall_s: float) -> dict[str, Any]:
    """What happened, as the run's files tell it."""
    status, lora = read_status(folder) or {}, folder / f"{folder.name}.safetensors"
    first = read_json(folder / "incidents" / "0001" / "incident.json") or {}
    return {
        "run": folder.name, "folder": str(folder), "state": status.get("state"), "steps": status.get("step"),
        "planned_steps": status.get("planned_steps"), "restarts": status.get("restarts"), "wall_s": round(wall_s, 1),
        **{name: first.get(name) for name in ("detect_s", "recover_s", "steps_repeated")},
        "lora": str(lora) if lora.exists() else None, "loads_in_diffusers": lora.exists() and loads_in_diffusers(lora),
        "times": times(folder), "stages": [asdict(stage) for stage in stages(folder)],
    }  # fmt: skip


def loads_in_diffusers(lora: Path) -> bool:
    """Whether diffusers alone, without this project's code, loads the LoRA into the tiny model."""
    command = [sys.executable, "-I", "-c", LOAD_LORA, str(models_dir() / "tiny-flux"), str(lora)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return done.returncode == 0 and done.stdout.strip().endswith("1")
