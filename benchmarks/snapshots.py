"""The cost of snapshots in memory in the trainers' own loops, in steps of one second, with a LoRA of rank 16 on a FLUX of random weights.

    python -m benchmarks snapshots [--trainer built-in | sd-scripts] [--blocks 6] [--steps 20] [--step-s 1.0] [--json]

The frozen model has few of FLUX's blocks: the LoRA has 100 MB with AdamW's moments (snapshot_loops.py). Two short trainings find the
length of captions with which a step takes `--step-s` of computation on all cores, or more where no length is short enough. In the
training that is measured, blocks of steps with snapshots and without take turns, so that other programs affect both equally
(snapshot_meter.py); a step in which the host of a virtual machine took more than 5 % of the processors away (`steal` in /proc/stat)
is left out. The share of the time is what the training waits for snapshots, by the clock, and the processor time of their own
thread, over the steps with snapshots. The limit is 1 %.

Without an installed sd-scripts its loop is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import snapshot_loops
from benchmarks.report import CannotMeasure, Report, say
from guards import snapshots

SHARE_LIMIT = 0.01
# Steps of the first two blocks that are not counted: records are allocated, and how often is found.
WARM_UP = 15
STOLEN = 0.05  # of a step
PROBES = (8, 96)  # tokens of the trainings that find how long a step takes
PROBE_STEPS = 5
Row = dict[str, Any]
TRAINERS = {"built-in": snapshot_loops.built_in, "sd-scripts": snapshot_loops.sd_scripts}


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--trainer", choices=TRAINERS, help="measure this one only")
    parser.add_argument("--blocks", type=int, default=6, help="with snapshots; as many without (6)")
    parser.add_argument("--steps", type=int, default=20, help=f"of each block; more than {WARM_UP} (20)")
    parser.add_argument("--step-s", type=float, default=1.0)


def measure(args: argparse.Namespace) -> Report:
    """Each trainer's figures."""
    if args.blocks < 2 or args.steps <= WARM_UP:
        raise CannotMeasure(
            f"--blocks must be at least 2 and --steps more than {WARM_UP}: the first blocks are the warm-up"
        )
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    found: dict[str, Any] = {}
    for trainer in [args.trainer] if args.trainer else TRAINERS:
        if trainer == "sd-scripts" and (missing := snapshot_loops.why_not_sd_scripts()):
            found[trainer] = {"skipped": missing}
        else:
            found[trainer] = one_trainer(trainer, args.blocks, args.steps, args.step_s)
        say(f"{trainer}: {json.dumps(found[trainer])}")
    return Report({**found, "limits": {"share_of_time": SHARE_LIMIT}}, judge(found))


def judge(found: dict[str, Any]) -> list[str]:
    """The trainers whose snapshots take more than the limit, a sentence each."""
    return [
        f"{trainer}: snapshots take {figures['share_of_time']:.2%} of the time, the limit is {SHARE_LIMIT:.0%}"
        for trainer, figures in found.items()
        if figures.get("share_of_time", 0.0) > SHARE_LIMIT
    ]


def one_trainer(trainer: str, blocks: int, steps: int, step_s: float) -> dict[str, Any]:
    """The figures of one trainer. Raises RuntimeError: a training failed, or too much was stolen from this machine; OSError: no /dev/shm."""
    ring = Path(tempfile.mkdtemp(prefix="hangproof-benchmark-", dir="/dev/shm"))
    try:
        with tempfile.TemporaryDirectory(prefix="snapshots-") as folder:
            start, record = TRAINERS[trainer](Path(folder)), Path(folder) / "record.jsonl"
            tokens = _tokens(start, record, ring, step_s)
            rows = _train(start, record, ring, tokens, 2 * blocks * steps + 1, steps)
            return {"state_mb": round(snapshots.status(ring)["bytes"] / 1e6, 1), "tokens": tokens, **figures(rows)}
    finally:
        shutil.rmtree(ring, ignore_errors=True)


def _train(start: snapshot_loops.Start, record: Path, ring: Path, tokens: int, steps: int, block: int) -> list[Row]:
    """Train, and return what the meter has recorded. Raises RuntimeError with the end of the log when the training fails."""
    record.unlink(missing_ok=True)
    command, env, folder = start(tokens, steps)
    env |= {"HANGPROOF_INJECT": "benchmarks.snapshot_meter:fire", "HANGPROOF_HEARTBEAT": str(record.parent / "beat")}
    env |= {"METER_RECORD": str(record), "METER_BLOCK": str(block), snapshots.FOLDER: str(ring)}
    done = subprocess.run(
        command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=3600, check=False
    )
    if done.returncode:
        tail = done.stdout[-3000:].decode(errors="replace")
        raise RuntimeError(f"the training ended with code {done.returncode}:\n{tail}")
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


def _tokens(start: snapshot_loops.Start, record: Path, ring: Path, step_s: float) -> int:
    """The length of captions with which a step takes `step_s`."""
    took = []
    for tokens in PROBES:
        rows = _train(start, record, ring, tokens, 2 * PROBE_STEPS + 1, PROBE_STEPS)
        took.append(statistics.median(row["wall_s"] for row in rows if not row["snapshots"]))
    each_s = max(1e-4, (took[1] - took[0]) / (PROBES[1] - PROBES[0]))
    return max(PROBES[0], PROBES[0] + round((step_s - took[0]) / each_s))


def figures(rows: list[Row]) -> dict[str, Any]:
    """The figures of measured steps (the meter's lines). Raises RuntimeError when they say nothing."""
    if rows[-1]["off"]:
        raise RuntimeError(f"snapshots were off: {rows[-1]['off']}")
    places: dict[int, int] = {}
    for row in rows:
        row["place"] = places[row["block"]] = places.get(row["block"], -1) + 1
    warm = [row for row in rows if row["block"] >= 2 or row["place"] >= WARM_UP]
    kept = [row for row in warm if row["stolen_s"] <= STOLEN * row["wall_s"]]
    ours, plain = ([row for row in kept if row["snapshots"] is with_them] for with_them in (True, False))
    left_out, taken = len(warm) - len(kept), [row for row in ours if row["taken"]]
    if not taken or 2 * min(len(ours), len(plain)) < left_out:
        raise RuntimeError(f"the machine's host took a processor away in {left_out} steps: too few are left to judge")
    total = sum(row["clock_s"] + row["thread_s"] + row["rest_s"] for row in ours)
    step_s = statistics.median(row["wall_s"] for row in plain)
    return {
        "every_steps": statistics.median(row["every"] for row in ours),
        "snapshots": len(taken),
        "steps": {"with": len(ours), "without": len(plain), "left_out": left_out},
        "in_its_step_ms": round(1e3 * statistics.median(row["clock_s"] for row in taken), 2),
        "with_its_thread_ms": round(1e3 * total / len(taken), 2),
        "share_of_time": round(total / len(ours) / step_s, 5),
        "step_s": {"with": round(statistics.median(row["wall_s"] for row in ours), 4), "without": round(step_s, 4)},
    }
