"""The cost of snapshots in memory in the trainers' own loops, in steps of one second, with a LoRA of rank 16 on a FLUX of random weights.

    python -m benchmarks snapshots [--trainer built-in | sd-scripts] [--blocks 6] [--steps 20] [--step-s 1.0] [--json]

The frozen model has few of FLUX's blocks: the LoRA has 100 MB with AdamW's moments (snapshot_loops.py). Two short trainings find the
length of captions with which a step takes `--step-s` of computation on all cores, or more where no length is short enough. In the
training that is measured, blocks of steps with snapshots, without, and with eight times their work take turns, so that other programs
affect all equally (snapshot_meter.py); a step in which the host of a virtual machine took more than 5 % of the processors away
(`steal` in /proc/stat) is left out, in all.
Reported: what a snapshot adds to its own step (processor time of the thread that trains, and by the clock), what its own thread uses,
how often one is taken, and the steps with and without: median, p99, and processor time of the process (all threads).

On a busy machine the p99 of wall times says how busy it is, which its 95 % interval shows. `judged_by` then names the work: how much
longer a step of `--step-s` is by its snapshot, by the clock, and by what the thread computes beside it. `slower` says what that is
worth: by how many seconds of the clock a second of this work makes a step longer, with its 95 % interval, from the blocks with eight
times the work. Above 1, it is counted.

Then saves of checkpoint and LoRA by the built-in trainer: how long the training waits for one, with the thread
(guards/state_saves.py) and without.

Exit code 1 where a limit is exceeded: 1 % of the time, 1.02 for the p99 step. Without an installed sd-scripts its loop is not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import snapshot_loops
from benchmarks.goodput import machine
from benchmarks.snapshot_meter import KINDS
from guards import snapshots

SHARE_LIMIT, P99_LIMIT = 0.01, 1.02
# Steps of the first block of each kind that are not counted: records are allocated, and how often is found.
WARM_UP = 15
STOLEN = 0.05  # of a step
NOISE = 0.01  # a p99 of steps without snapshots this far above their median says that the machine is busy
PROBES = (8, 96)  # tokens of the trainings that find how long a step takes
PROBE_STEPS = 5
SAVES, SAVE_EVERY = 9, 3
Row = dict[str, Any]
TRAINERS = {"built-in": snapshot_loops.built_in, "sd-scripts": snapshot_loops.sd_scripts}


class Training:
    """One trainer, prepared in a folder."""

    def __init__(self, start: snapshot_loops.Start, work: Path, ring: Path) -> None:
        self.start, self.work, self.ring = start, work, ring

    def rows(self, tokens: int, steps: int, block: int, *more: str, memory: bool = True) -> list[Row]:
        """Train, and return what the meter has recorded. Raises RuntimeError with the end of the log when the training fails."""
        record = self.work / "record.jsonl"
        record.unlink(missing_ok=True)
        command, env, folder = self.start(tokens, steps, *more)
        env |= {"HANGPROOF_INJECT": "benchmarks.snapshot_meter:fire", "HANGPROOF_HEARTBEAT": str(self.work / "beat")}
        env |= {"METER_RECORD": str(record), "METER_BLOCK": str(block)}
        env |= {snapshots.FOLDER: str(self.ring)} if memory else {}
        done = subprocess.run(
            command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=3600, check=False
        )
        if done.returncode:
            raise RuntimeError(
                f"the training ended with code {done.returncode}:\n{done.stdout[-3000:].decode(errors='replace')}"
            )
        return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]

    def tokens(self, step_s: float) -> int:
        """The length of captions with which a step takes `step_s`."""
        took = []
        for tokens in PROBES:
            rows = self.rows(tokens, 2 * PROBE_STEPS + 1, PROBE_STEPS)
            took.append(statistics.median(row["wall_s"] for row in rows if not row.get("times", 1)))
        each_s = max(1e-4, (took[1] - took[0]) / (PROBES[1] - PROBES[0]))
        return max(PROBES[0], PROBES[0] + round((step_s - took[0]) / each_s))

    def saves(self, tokens: int) -> dict[str, dict[str, float]]:
        """Milliseconds that the training waits for a checkpoint with its LoRA, wall and own processor time: medians."""
        flags = ("--save_state", "--save_every_n_steps", str(SAVE_EVERY), "--save_last_n_steps", str(2 * SAVE_EVERY))
        found = {}
        for name, memory in (("with", True), ("without", False)):
            rows = self.rows(tokens, SAVES * SAVE_EVERY + 1, 0, *flags, memory=memory)
            by_step: dict[int, list[float]] = {}
            for row in rows:
                if row["save"] % SAVE_EVERY == 0:
                    total = by_step.setdefault(row["save"], [0.0, 0.0])
                    total[0] += row["wall_s"]
                    total[1] += row["cpu_s"]
            wall, cpu = zip(*by_step.values(), strict=True)
            found[name] = {"wall": ms(statistics.median(wall)), "processor": ms(statistics.median(cpu))}
        return found


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def measure(trainer: str, blocks: int, steps: int, step_s: float) -> dict[str, Any]:
    """The figures of one trainer. Raises RuntimeError: a training failed, or too much was stolen from this machine; OSError: no /dev/shm."""
    ring = Path(tempfile.mkdtemp(prefix="hangproof-benchmark-", dir="/dev/shm"))
    try:
        with tempfile.TemporaryDirectory(prefix="snapshots-") as folder:
            work = Path(folder)
            training = Training(TRAINERS[trainer](work), work, ring)
            tokens = training.tokens(step_s)
            rows = training.rows(tokens, len(KINDS) * blocks * steps + 1, steps)
            bytes_ = snapshots.status(ring)["bytes"]
            found = {
                "state_mb": round(bytes_ / 1e6, 1),
                "tokens": tokens,
                **figures([row for row in rows if "times" in row], step_s),
            }
            return found | ({"save_ms": training.saves(tokens)} if trainer == "built-in" else {})
    finally:
        shutil.rmtree(ring, ignore_errors=True)


def figures(rows: list[Row], step_s: float = 1.0) -> dict[str, Any]:
    """The figures of measured steps (the meter's lines). Raises RuntimeError when they say nothing.

    step_s: the length that a step was to have.
    """
    if rows[-1]["off"]:
        raise RuntimeError(f"snapshots were off: {rows[-1]['off']}")
    places: dict[int, int] = {}
    for row in rows:
        row["place"] = places[row["block"]] = places.get(row["block"], -1) + 1
    warm = [row for row in rows if row["block"] >= len(KINDS) or row["place"] >= WARM_UP]
    kept = [row for row in warm if row["stolen_s"] <= STOLEN * row["wall_s"]]
    ours, plain, more = ([row for row in kept if row["times"] == times] for times in KINDS)
    busy = [row for row in more if spent_s(row) >= SHARE_LIMIT * row["wall_s"]]
    left_out, taken = len(warm) - len(kept), [row for row in ours if row["taken"]]
    if not taken or not busy or len(KINDS) * min(len(ours), len(plain), len(more)) < left_out:
        raise RuntimeError(f"the machine's host took a processor away in {left_out} steps: too few are left to judge")
    work = [spent_s(row) for row in ours]
    slower = seconds_per_second(busy, plain)
    longer = [longer_by_work(row, step_s, max(1.0, slower["found"])) for row in ours]
    total = sum(work) + sum(row["rest_s"] for row in ours)
    inside, clock = ([row[name] for row in taken] for name in ("inside_s", "clock_s"))
    walls = {name: [row["wall_s"] for row in those] for name, those in (("with", ours), ("without", plain))}
    middle = statistics.median(walls["without"])
    p99 = {name: percentile(wall, 0.99) for name, wall in walls.items()}
    cpu = {name: [row["cpu_s"] for row in those] for name, those in (("with", ours), ("without", plain))}
    return {
        "every_steps": statistics.median(row["every"] for row in ours),
        "snapshots": len(taken),
        "steps": {"with": len(ours), "without": len(plain), "more": len(more), "left_out": left_out},
        "in_its_step_ms": {"p50": ms(statistics.median(inside)), "p99": ms(percentile(inside, 0.99)), "clock": ms(statistics.median(clock))},
        "with_its_thread_ms": ms(total / len(taken)),
        "share_of_time": round(total / len(ours) / middle, 5),
        "step_s": {name: {"p50": round(statistics.median(wall), 4), "p99": round(p99[name], 4)} for name, wall in walls.items()},
        "step_cpu_s": {name: round(statistics.mean(values), 4) for name, values in cpu.items()},
        "share_of_cpu": bootstrap(cpu["with"], cpu["without"], lambda ours, plain: statistics.mean(ours) / statistics.mean(plain) - 1),
        "slower": slower,
        "p99_ratio": bootstrap(walls["with"], walls["without"], lambda ours, plain: percentile(ours, 0.99) / percentile(plain, 0.99)),
        "p99_ratio_by_work": round(percentile(longer, 0.99), 4),
        "judged_by": "work" if p99["without"] / middle - 1 > NOISE else "p99",
    }  # fmt: skip


def spent_s(row: Row) -> float:
    """Seconds that snapshots took in a step: of the thread that trains by the clock, and processor time of their own."""
    return float(row["clock_s"] + row["thread_s"])


def longer_by_work(row: Row, step_s: float, slower: float) -> float:
    """How many times as long a step is by the snapshots in it. slower: seconds of the clock for each second of their work.

    The training waits for the copy, by the clock, as long in a short step as in a long one. So of a step that is longer than it was
    to be, the copy counts as a part of `step_s`. The thread, which the training does not wait for, gets a share of each step.
    """
    without_s = row["wall_s"] - spent_s(row)
    return float(1 + slower * (row["clock_s"] / min(step_s, without_s) + row["thread_s"] / without_s))


def seconds_per_second(busy: list[Row], plain: list[Row]) -> dict[str, float]:
    """By how many seconds a second of the work of snapshots makes a step longer. Of medians: a few steps take twice as long as others.

    busy: steps with much of that work. plain: steps with none.
    """

    def found(busy: list[Row], plain: list[Row]) -> float:
        longer_s = statistics.median(row["wall_s"] for row in busy) - statistics.median(row["wall_s"] for row in plain)
        return longer_s / statistics.median(map(spent_s, busy))

    return bootstrap(busy, plain, found)


def bootstrap(ours: list[Any], plain: list[Any], figure: Callable[[list[Any], list[Any]], float]) -> dict[str, float]:
    """A figure of two samples, with its 95 % interval."""
    draw = random.Random(0)
    found = sorted(figure(draw.choices(ours, k=len(ours)), draw.choices(plain, k=len(plain))) for _ in range(2000))
    return {"found": round(figure(ours, plain), 4), "low": round(found[50], 4), "high": round(found[1949], 4)}


def judge(trainer: str, found: dict[str, Any]) -> list[str]:
    """The limits that are exceeded, one sentence each."""
    ratio = found["p99_ratio"]["found"] if found["judged_by"] == "p99" else found["p99_ratio_by_work"]
    wrong = []
    if found["share_of_time"] > SHARE_LIMIT:
        wrong.append(
            f"{trainer}: snapshots take {found['share_of_time']:.2%} of the time, the limit is {SHARE_LIMIT:.0%}"
        )
    if ratio > P99_LIMIT:
        wrong.append(
            f"{trainer}: the p99 step ({found['judged_by']}) is {ratio:.3f} times as long, the limit is {P99_LIMIT}"
        )
    return wrong


def describe(trainer: str, found: dict[str, Any]) -> str:
    """The figures for people."""
    inside, steps, share, slower, p99 = (
        found[name] for name in ("in_its_step_ms", "step_s", "share_of_cpu", "slower", "p99_ratio")
    )
    lines = [
        f"{trainer}: state {found['state_mb']} MB, a snapshot every {found['every_steps']:g} steps of {steps['without']['p50']:.2f} s: "
        f"{inside['p50']} ms in its step ({inside['clock']} by the clock), {found['with_its_thread_ms']} ms with its thread, {found['share_of_time']:.2%} of the time",
        f"processor time of a step: {share['found']:+.2%} ({share['low']:+.2%} to {share['high']:+.2%}); a second of this work makes a step "
        f"{slower['found']:.2f} s longer ({slower['low']:.2f} to {slower['high']:.2f}); p99 step × {p99['found']} ({p99['low']} to {p99['high']}), "
        f"× {found['p99_ratio_by_work']} by work; judged by {found['judged_by']}",
    ]
    waits = [
        f"{v['wall']:.0f} ms ({v['processor']:.0f} ms processor time) {k} a thread"
        for k, v in found.get("save_ms", {}).items()
    ]
    return "\n  ".join(lines + (["the training waits for a save " + ", ".join(waits)] if waits else []))


def main(argv: list[str]) -> int:
    """Exit code 0 within the limits, 1 else."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks snapshots", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trainer", choices=TRAINERS, help="measure this one only")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20, help=f"of each block; more than {WARM_UP}")
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="end standard output with one line of JSON")
    args = parser.parse_args(argv)
    if args.blocks < 2 or args.steps <= WARM_UP:
        parser.error(
            f"--blocks: at least 2; --steps: more than {WARM_UP}, because the first ones of three blocks are the warm-up"
        )
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    found: dict[str, Any] = {}
    wrong = []
    for trainer in [args.trainer] if args.trainer else TRAINERS:
        if trainer == "sd-scripts" and (missing := snapshot_loops.why_not_sd_scripts()):
            found[trainer] = {"skipped": missing}
            print(f"{trainer}: {missing}")
            continue
        found[trainer] = measure(trainer, args.blocks, args.steps, args.step_s)
        wrong += judge(trainer, found[trainer])
        print(describe(trainer, found[trainer]), flush=True)
    print("\n".join(wrong), file=sys.stderr)
    if args.json:
        print(json.dumps({"machine": machine(), **found, "exceeded": wrong, "ok": not wrong}))
    return 1 if wrong else 0
