"""Pre-emption: everything of a run is killed at random moments, and an empty machine continues from the store alone.

    python -m benchmarks preemption [--training toy|tiny] [--store ADDRESS] [--kills 20] [--every STEPS] [--seed S]

Decision: one run, as many machines as kills. Each machine is an empty data root that gets the run by `python -m launch store
restore`; SIGKILL ends all its processes (keeper, monitor, agent, trainer, or the restore itself) at a moment drawn from KILLS.
The last machine trains to the end. Checked: the LoRA has the bytes of the undisturbed run; each machine begins at a checkpoint
that is at most one save interval older than the newest complete one of the machine before; what was repeated is reported.

`--store`: default a folder that is deleted at the end. Credentials come from the environment, as for a real run.
Exit code 0: all of this held; 1: each violation is printed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.machines import Machine, Training, enter_processes, tiny, toy
from benchmarks.report import Report

END_S = 900.0
KILLS = ("copying", "training", "copying", "training", "restoring", "copying", "training", "starting")  # taken in turn
# The steps leave room for as many machines as there are kills: each repeats some, and adds about two intervals.
STEPS_PER_KILL = {"toy": 60, "tiny": 10}
EVERY = {"toy": 40, "tiny": 8}


@dataclass
class Life:
    """What one machine did. `repeated`: steps of the machine before that it trained once more."""

    moment: str
    began_at: int = 0  # the step of the checkpoint that it started from
    reached: int = 0  # the last step that it trained
    saved: int = 0  # the newest complete checkpoint on its disk
    repeated: int = 0
    was_copying: bool = False
    took_s: float = 0.0


def live(machine: Machine, life: Life, address: str, fields: dict[str, Any] | None, draw: random.Random) -> int | None:
    """Let a machine train until its moment has come; its exit code when the run ended first, else None.

    fields: the spec's fields for the machine that makes the run, None for one that restores it.
    """
    interval_s = machine.training.every * machine.training.step_s
    if fields is not None:
        machine.training.create(machine.data, fields)
    elif not machine.restore(address, draw.uniform(0.05, 2.0) if life.moment == "restoring" else None):
        return None
    machine.run()
    if life.moment == "":
        return machine.wait(END_S)
    if life.moment == "starting":
        time.sleep(draw.uniform(0.0, 3.0))
    else:
        trained = machine.training.trained
        first = machine.until(lambda: trained(machine.data), "the first step")[0]
        if life.moment == "copying":
            machine.until(lambda: trained(machine.data)[-1] > first and machine.copying(), "a copy under way")
            time.sleep(draw.uniform(0.0, 0.3))
        else:
            time.sleep(draw.uniform(0.0, 2.5 * interval_s))
    code = machine.process.poll() if machine.process else None
    life.was_copying = machine.copying()
    machine.kill()
    return code


def campaign(
    training: Training,
    address: str,
    kills: int,
    seed: int,
    work: Path,
    environment: dict[str, str],
    limits: dict[str, float],
) -> dict[str, Any]:
    """Play the run on kills + 1 machines: {"kills", "lives", "violations", …}. Leaves no process, and its files in `work`.

    limits: of [store] in the monitor's configuration.
    """
    draw, lives, violations = random.Random(seed), list[Life](), list[str]()
    trained, saved = 0, 0  # the last step of the machine that trained before; the newest complete checkpoint so far
    known = False  # the store has the run: the first machine lived long enough to put it there
    began_s, enter = time.monotonic(), enter_processes()
    for number in range(kills + 1):
        life = Life(KILLS[number % len(KILLS)] if number < kills else "")
        if life.moment == "restoring" and not known:
            life.moment = "training"
        machine = Machine(training, work / f"machine-{number:02d}", dict(environment), enter, limits)
        life_s = time.monotonic()
        try:
            code = live(machine, life, address, None if known else {"store": address}, draw)
        finally:
            machine.kill()
        steps = training.trained(machine.data)
        life.took_s = round(time.monotonic() - life_s, 1)
        life.saved = machine.newest_checkpoint()
        if steps:
            life.began_at, life.reached = steps[0] - 1, steps[-1]
            life.repeated = max(0, trained - life.began_at)
            if life.began_at < saved - training.every:
                lost = f"its predecessor had the checkpoint of step {saved}"
                violations.append(f"machine {number} began at step {life.began_at}, but {lost}")
            trained = life.reached
        lives.append(life)
        known = known or machine.status().get("store", {}).get("step") is not None
        saved = max(saved, life.saved) if known else 0
        if life.moment and code is not None:
            violations.append(
                f"machine {number}: the run ended with exit code {code} before its kill\n{machine.output()[-2000:]}"
            )
            break
        if life.moment:
            shutil.rmtree(machine.root)
            continue
        if code or machine.lora() != training.expected():
            violations.append(f"exit code {code}, LoRA {machine.lora() or 'missing'}, expected {training.expected()}")
            violations.append(machine.output()[-2000:])
    return {
        "training": training.name,
        "store": address.partition(":")[0] if "://" in address else "folder",
        "seed": seed,
        "kills": sum(bool(life.moment) for life in lives),
        "while_copying": sum(life.was_copying for life in lives),
        "save_interval": training.every,
        "repeated": [life.repeated for life in lives],
        "repeated_max": max(life.repeated for life in lives),
        # After a kill while it copied: the machine before is the one that was killed.
        "repeated_max_copying": max(
            (life.repeated for before, life in pairwise(lives) if before.was_copying), default=0
        ),
        "repeated_more_than_an_interval": sum(life.repeated > training.every for life in lives),
        "took_s": round(time.monotonic() - began_s, 1),
        "lives": [vars(life) for life in lives],
        "violations": violations,
    }


def training_of(name: str, kills: int, every: int = 0) -> Training:
    """The training by name, long enough for so many kills. every: steps between two saves, 0: as in EVERY."""
    every = every or EVERY[name]
    steps = every * 2 + STEPS_PER_KILL[name] * kills * every // EVERY[name]
    return toy(steps, every) if name == "toy" else tiny(steps, every)


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--training", choices=("toy", "tiny"), default="toy")
    parser.add_argument("--store", metavar="ADDRESS", help="default: a folder that is deleted at the end")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--every", type=int, default=0, metavar="STEPS", help="between two saves; a step of toy takes 0.05 s"
    )
    parser.add_argument("--extra-saves", type=int, default=1, metavar="COUNT", help="between two saves; 0 to compare")
    parser.add_argument("--seed", type=int, default=0)


def measure(args: argparse.Namespace) -> Report:
    """One campaign."""
    with tempfile.TemporaryDirectory(prefix="preemption-") as work:
        address = args.store or str(Path(work) / "store")
        training, limits = training_of(args.training, args.kills, args.every), {"extra_saves_count": args.extra_saves}
        result = campaign(training, address, args.kills, args.seed, Path(work), {}, limits)
    return Report(result, result["violations"])
