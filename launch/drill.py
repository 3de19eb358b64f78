"""`python -m launch drill`: a run that freezes in the middle, so that one sees what happens then: detection, reason, kill, restart, end.

It is always a run of its own, with the tiny model and example photos: a real run is never frozen. The freeze comes from the fault
injector of the benchmarks; all else is what any run has. `drill.json` in the run's folder marks it, and `stages` reads
from the run's files what has happened so far, so the page shows it live and needs no process of its own.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import runs
from launch.common import LaunchError, report
from monitor.cli.commands import launch as start_monitor
from monitor.run_folder import EVENTS, MonitorError, read_json
from monitor.state import FINAL, read_status
from runs.examples import TRIGGER, write_examples
from runs.files import atomic_write

FILE = "drill.json"
NAME = "hang drill"
STEPS, FREEZE_AT, SAVE_EVERY = 60, 25, 10
PACE_S = 0.25
WAIT_S = 600.0
SETTINGS: dict[str, Any] = {
    "model": "tiny-flux", "backend": "diffusers", "tier": "16G", "resolution": 64, "mixed_precision": "no", "repeats": 1,
    "max_train_steps": STEPS, "save_every_n_steps": SAVE_EVERY, "sample_every_n_steps": STEPS, "trigger": TRIGGER,
    "prompts": [f"{TRIGGER}, a shiny red ball"], "workers": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A way to freeze. fault: of benchmarks/injector.py. label: of the choice. text: what happens in the trainer."""

    fault: str
    label: str
    text: str


FAULTS = {
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


@dataclass
class Stage:
    """One stage of the drill. state: waiting, running or done. at_s: seconds since the freeze, None before and where not known."""

    key: str
    title: str
    text: str
    state: str = "waiting"
    at_s: float | None = None


def start(kind: str = USUAL) -> Path:
    """Create the demo run, and start it with the freeze in it. Changes the environment of this process.

    Returns:
        The run's folder; it trains in the background.

    Raises:
        LaunchError: there is no such kind, or it cannot be started. runs.files.RunError: it cannot be created.
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
    try:
        start_monitor(folder)
    except MonitorError as error:
        raise LaunchError(str(error)) from error
    return folder


def stages(folder: Path) -> list[Stage]:
    """The stages of the drill in `folder` as its files tell them now; [] for a run that is no drill."""
    about = read_json(folder / FILE)
    fault = FAULTS.get(str((about or {}).get("kind")))
    if fault is None:
        return []
    status, events = read_status(folder) or {}, _events(folder)
    hang = next((e for e in events if e.get("kind") in ("hang", "crash")), None)
    incident = read_json(folder / "incidents" / "0001" / "incident.json") or {}
    froze_s = _froze_s(hang)
    suspect, killed = (next((e for e in events if e.get("kind") == kind), None) for kind in ("suspect", "killed"))
    restarted = next((e for e in events if e.get("kind") == "restarted"), None)
    progress = next((e for e in events if e.get("kind") == "progress" and _after(e, hang)), None)
    ended = status.get("state") in FINAL
    frozen = hang is not None or suspect is not None or int(status.get("step") or 0) >= FREEZE_AT
    texts = [
        ("train", "Training", f"The tiny model trains {STEPS} steps and saves a checkpoint every {SAVE_EVERY}.", True, None),
        ("freeze", f"Frozen at step {(hang or {}).get('step') or FREEZE_AT}", fault.text, frozen, 0.0 if frozen else None),
        (
            "detect", "Detected",
            "No step was completed for much longer than steps of this run take, and no process does any work."
            if hang else "The monitor knows how long a step of this run takes, and compares.",
            hang is not None, _since(hang, froze_s),
        ),
        ("explain", "Explained", _explained(hang, incident), bool(incident), _since(hang, froze_s)),
        (
            "kill", "Killed", str((killed or {}).get("message", "")).capitalize() + "." if killed
            else "The stuck processes are killed, with all that they started.", killed is not None, _since(killed, froze_s),
        ),
        (
            "restart", "Restarted", str(restarted["message"]).capitalize() + "." if restarted
            else "The run starts again from its newest checkpoint that verifies.", restarted is not None, _since(restarted, froze_s),
        ),
        (
            "recover", "Trains on", str((progress or {}).get("message", "")).capitalize() + "." if progress
            else "The first step that was not trained before.", progress is not None, _since(progress, froze_s),
        ),
        (
            "end", "Finished", str(status.get("message") or status.get("state")) if ended
            else f"All {STEPS} steps are trained and the LoRA verifies.", ended, None,
        ),
    ]  # fmt: skip
    found = [Stage(key, title, text, "done" if done else "waiting", at_s) for key, title, text, done, at_s in texts]
    reached = max((n for n, stage in enumerate(found) if stage.state == "done"), default=0)
    for stage in found[:reached]:
        stage.state = "done"
    if not ended:
        found[min(reached + 1, len(found) - 1) if reached else 0].state = "running"
    return found


def times(folder: Path) -> dict[str, float]:
    """Seconds that were measured, by name, as far as they are known: detected, killed, restarted, recovered (since the freeze)."""
    names = {"detect": "detected", "kill": "killed", "restart": "restarted", "recover": "recovered"}
    return {
        names[stage.key]: round(stage.at_s, 1)
        for stage in stages(folder)
        if stage.key in names and stage.at_s is not None
    }


def _events(folder: Path) -> list[dict[str, Any]]:
    found = []
    try:
        lines = (folder / EVENTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _mono(event: Mapping[str, Any] | None) -> float | None:
    value = (event or {}).get("mono_s")
    return float(value) if isinstance(value, int | float) else None


def _after(event: Mapping[str, Any], hang: Mapping[str, Any] | None) -> bool:
    one, other = _mono(event), _mono(hang)
    return one is not None and other is not None and one >= other


def _froze_s(hang: Mapping[str, Any] | None) -> float | None:
    """When it froze, in monotonic seconds: the detection says how long before it the last progress was."""
    at_s, since_s = _mono(hang), (hang or {}).get("since_s")
    return at_s - float(since_s) if at_s is not None and isinstance(since_s, int | float) else at_s


def _since(event: Mapping[str, Any] | None, froze_s: float | None) -> float | None:
    at_s = _mono(event)
    return None if at_s is None or froze_s is None else max(0.0, at_s - froze_s)


def _explained(hang: Mapping[str, Any] | None, incident: Mapping[str, Any]) -> str:
    cause = incident.get("explanation") or (hang or {}).get("message")
    return str(cause) if cause else "The monitor collects the stack of every thread and names the likely cause."


# The command ------------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m launch drill`."""
    parser.add_argument("--kind", choices=list(FAULTS), default=USUAL, help=f"what freezes (default: {USUAL})")
    parser.add_argument("--no-wait", action="store_true", help="only start it; the page shows the rest")


def run(args: argparse.Namespace) -> int:
    """Exit code 0: it finished after one recovery (with --no-wait: it was started)."""
    folder = start(args.kind)
    print(f"The demo run trains in {folder}; it freezes at step {FREEZE_AT}.", flush=True)
    if args.no_wait:
        return report(args, "", {"run": folder.name, "folder": str(folder)})
    shown, until_s = set[str](), time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        for stage in stages(folder):
            if stage.state == "done" and stage.key not in shown:
                shown.add(stage.key)
                after = f" ({stage.at_s:.1f} s after the freeze)" if stage.at_s else ""
                print(f"{stage.title}{after}: {stage.text}", flush=True)
        if (read_status(folder) or {}).get("state") in FINAL:
            break
        time.sleep(0.25)
    state = (read_status(folder) or {}).get("state")
    answer = {
        "run": folder.name, "folder": str(folder), "state": state, "times": times(folder),
        "stages": [asdict(stage) for stage in stages(folder)],
    }  # fmt: skip
    if state != "completed":
        print(f"launch drill: the run ended as {state}; read {folder / 'monitor.log'}", file=sys.stderr)
    report(args, "", answer)
    return 0 if state == "completed" else 1
