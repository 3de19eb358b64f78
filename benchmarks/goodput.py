"""Goodput under faults: the same loop, the same faults at the same steps, three supervisors.

    python -m benchmarks goodput [--json] [--repeats 3] [--contenders ours,torchrun,ft_launcher] [--no-torch]

Decision: every contender runs `toy_loop.py` by its own public command line, with its own way to a restart. Ours gets
no tuning at all. nvidia-resiliency-ext's ft_launcher, whose defaults detect a hang after 45 minutes, gets timeouts
set by hand for this loop; its modules are installed on first use in a folder of the cache (30 MB). torchrun has
nothing to tune: it only sees processes end. Contenders take turns, so that a slow minute of the machine affects all
of them.

The loop keeps a ledger, and every figure but one is computed from it, in the same way for every contender. The
exception is *detection* (fault → hang declared), which comes from the contender's own events or log. p50 and p95 are
nearest ranks over all faults of all runs. *hang_to_step* and *crash_to_step* end with the first step that had not
been trained before the fault.

A fault that a contender cannot detect would last forever. After `--limit` seconds the benchmark kills the process
with SIGKILL, as an operator would, counts the fault as `unseen`, and reports null for detection and recovery: the
goodput of that contender is then an upper bound that depends on the limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks import toy_loop
from benchmarks.report import CannotMeasure, Report, say
from benchmarks.trial import STEP_S, Job, ours, read_lines, started, toy_environment
from monitor.process import platform as processes

LOOP = Path(toy_loop.__file__)
EVERY = 20
FAULTS = ("step_sleeps@47", "sigkill@88", "sigstop@131", "raises@167", "gil_held@212")
HANGS = ("step_sleeps", "sigstop", "gil_held", "busy_loop", "lock_deadlock")
WALL_S = 600.0  # a run that is not over by then counts as not finished
LIMITS = {  # of ours, and of ratios ours / theirs: (the least, the most)
    "detection_p95_s": (0.0, 3.0),
    "repeated_for_each_fault": (0.0, 1.0),
    "crash_to_step_p95_of_torchrun": (0.0, 0.35),
    "hang_to_step_p95_of_ft_launcher": (0.0, 0.5),
    "goodput_of_ft_launcher": (1.5, math.inf),
    "goodput_of_torchrun": (1.0, math.inf),
}
NVRX = "nvidia-resiliency-ext==0.4.1"
NVRX_NEEDS = ("defusedxml==0.7.1",)  # its other requirements are in the project's own environment
NVRX_TIMEOUT_S = 2.0
NVRX_CHECK_S = 0.5
ELASTIC = (
    "--nnodes=1",
    "--nproc-per-node=1",
    "--max-restarts=100",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=127.0.0.1:0",
)
INSTALL_S = 600.0


@dataclass(frozen=True)
class Contender:
    """`start(work, steps, every)` prepares a run; `noticed(job)`: at which wall-clock times it declared hangs."""

    tuning: str
    start: Callable[[Path, int, int], Job]
    noticed: Callable[[Job], list[float]]


def _arguments(output: Path, steps: int, every: int) -> list[str]:
    return [
        *("--output_dir", str(output), "--output_name", "toy"),
        *("--max_train_steps", str(steps), "--save_every_n_steps", str(every)),
    ]


def _ours_noticed(job: Job) -> list[float]:
    events = read_lines(job.folder / "events.jsonl")
    return [datetime.fromisoformat(event["t"]).timestamp() for event in events if event["kind"] == "hang"]


def torchrun(work: Path, steps: int, every: int) -> Job:
    """torch's own launcher: exit codes only."""
    command = [sys.executable, "-m", "torch.distributed.run", *ELASTIC, str(LOOP)]
    return Job(command + _arguments(work / "output", steps, every), work / "contender.log", work / "output")


def ft_launcher(work: Path, steps: int, every: int) -> Job:
    """nvidia-resiliency-ext, its timeouts set by hand for a loop of 50 ms steps."""
    command = [sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", *ELASTIC]
    command += [
        f"--ft-rank-heartbeat-timeout={NVRX_TIMEOUT_S}",
        f"--ft-workload-check-interval={NVRX_CHECK_S}",
        "--ft-initial-rank-heartbeat-timeout=60",
        "--ft-enable-nic-monitor=False",
        "--ignore-missing-fault-tol-cfg",
        str(LOOP),
    ]
    command += _arguments(work / "output", steps, every)
    variables = {"TOY_CLIENT": "nvrx", "PYTHONPATH": str(nvrx())}
    return Job(command, work / "contender.log", work / "output", variables)


def _nvrx_noticed(job: Job) -> list[float]:
    found = []
    for line in job.log.read_text(encoding="utf-8", errors="replace").splitlines():
        match = re.match(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})\].*FT timeout elapsed", line)
        if match:
            found.append(datetime.fromisoformat(match[1]).timestamp() + int(match[2]) / 1000)
    return found


def nvrx() -> Path:
    """The folder of its modules, installed on first use, for the project's own interpreter and torch.

    Raises CannotMeasure where it cannot be installed (it has wheels for Linux and some Python versions only).
    """
    cache = os.environ.get("HANGPROOF_CACHE") or "~/.cache/hangproof"
    version = f"py{sys.version_info[0]}{sys.version_info[1]}"
    folder = Path(cache).expanduser() / f"goodput-{NVRX.replace('==', '-')}-{version}-modules"
    if not folder.exists():
        say(f"goodput: installing {NVRX} into {folder} …")
        with tempfile.TemporaryDirectory() as scratch:
            install = ["install", "--quiet", "--no-deps", "--only-binary=:all:", "--target", f"{scratch}/made"]
            command = [sys.executable, "-m", "pip", *install, NVRX, *NVRX_NEEDS]
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["pip printed no reason"])[-1]
                raise CannotMeasure(f"{NVRX} could not be installed: {last}")
            shutil.copytree(f"{scratch}/made", folder)
    return folder


BY_HAND = f"by hand: heartbeat timeout {NVRX_TIMEOUT_S:g} s, checked every {NVRX_CHECK_S:g} s (its default: 2,700 s)"
CONTENDERS = {
    "ours": Contender("none", ours, _ours_noticed),
    "torchrun": Contender("none: it sees processes end, not hang", torchrun, lambda _: []),
    "ft_launcher": Contender(BY_HAND, ft_launcher, _nvrx_noticed),
}


def one_run(contender: Contender, steps: int, faults: tuple[str, ...], limit_s: float, torch: bool) -> dict:
    """Run a contender once, from its start to its end, and score it."""
    work = Path(tempfile.mkdtemp(prefix="goodput-"))
    try:
        job = contender.start(work, steps, EVERY)
        environment = toy_environment(work, ",".join(faults)) | {"TOY_TORCH": "1" if torch else "0"}
        ledger, begun_s = work / "ledger.jsonl", time.monotonic()
        with started(job, environment) as process:
            unseen, ended = watch(process, ledger, limit_s, begun_s)
        wall_s = (ended or time.monotonic()) - begun_s
        loras = list(job.folder.glob("toy.safetensors"))
        return {
            **score(read_lines(ledger), contender.noticed(job), steps, unseen, wall_s),
            "exit_code": process.returncode if ended else None,
            "finished": ended is not None and bool(loras),
            "right": bool(loras) and loras[0].read_bytes() == toy_loop.expected(steps),
        }
    finally:
        if not os.environ.get("GOODPUT_KEEP"):
            shutil.rmtree(work, ignore_errors=True)


def watch(
    process: subprocess.Popen[bytes], ledger: Path, limit_s: float, begun_s: float
) -> tuple[list[int], float | None]:
    """Wait for the end; the steps of the hangs that had to be killed here, and when the contender ended (None: not)."""
    unseen: list[int] = []
    while process.poll() is None:
        if time.monotonic() - begun_s > WALL_S:
            return unseen, None
        time.sleep(0.05)
        lines = read_lines(ledger)
        last = lines[-1] if lines else None
        if last and last["what"] in HANGS and time.monotonic() - last["t"] > limit_s and last["step"] not in unseen:
            unseen.append(last["step"])
            found = processes.process_info(last["pid"])
            if found is not None:
                processes.send(last["pid"], found.start, signal.SIGKILL)
    return unseen, time.monotonic()


def score(lines: list[dict], noticed: list[float], steps: int, unseen: list[int], wall_s: float) -> dict:
    """Figures of one run from its ledger. `noticed`: wall-clock seconds at which the contender declared hangs."""
    done = [line for line in lines if line["what"] == "step"]
    different = len({line["step"] for line in done})
    faults = [line for line in lines if line["what"] not in ("start", "resume", "step", "done")]
    found: dict[str, list[float]] = {"detection_s": [], "hang_to_step_s": [], "crash_to_step_s": []}
    for fault in faults:
        later = [line["t"] for line in done if line["t"] > fault["t"] and line["step"] > fault["step"]]
        hang = fault["what"] in HANGS
        if fault["step"] in unseen or not later:
            continue
        found["hang_to_step_s" if hang else "crash_to_step_s"].append(min(later) - fault["t"])
        until = fault["wall"] + min(later) - fault["t"]
        declared = [t - fault["wall"] for t in noticed if fault["wall"] - 0.01 <= t <= until]
        if hang and declared:
            found["detection_s"].append(max(0.0, min(declared)))
    return {
        "faults": len(faults),
        "hangs": sum(f["what"] in HANGS for f in faults),
        "unseen": len(unseen),
        **found,
        "repeated": len(done) - different,
        "useful_s": STEP_S * different,
        "wall_s": wall_s,
        "steps": different,
    }


def spread(values: list[float]) -> dict | None:
    """p50 and p95 by nearest rank, rounded to ms, and the number of values; None without any."""
    ordered = sorted(values)
    ranks = {f"p{share}": -(-share * len(ordered) // 100) - 1 for share in (50, 95)}
    return {name: round(ordered[rank], 3) for name, rank in ranks.items()} | {"n": len(values)} if values else None


def summarize(contender: Contender, runs: list[dict]) -> dict:
    """One contender's figures over all its runs."""
    unseen = sum(r["unseen"] for r in runs)
    times = ("detection_s", "hang_to_step_s", "crash_to_step_s")
    return {
        "tuning": contender.tuning,
        "runs": len(runs),
        "finished": sum(r["finished"] for r in runs),
        "right_result": sum(r["right"] for r in runs),
        "hangs": sum(r["hangs"] for r in runs),
        "unseen": unseen,
        **{key: spread([value for run in runs for value in run[key]]) for key in times},
        "repeated_steps": round(statistics.mean(r["repeated"] for r in runs), 1),
        "wall_s": round(statistics.mean(r["wall_s"] for r in runs), 2),
        "goodput": round(sum(r["useful_s"] for r in runs) / sum(r["wall_s"] for r in runs), 4),
        "goodput_depends_on_limit": unseen > 0,
        "each_run": runs,
    }


def compare(results: dict[str, dict]) -> dict[str, float | None]:
    """Ours / theirs: failure → next new step (below 1: ours is faster), goodput (above 1: ours is better)."""
    found: dict[str, float | None] = {}
    for other in (name for name in ("ft_launcher", "torchrun") if name in results):
        both = [results.get(name, {}) for name in ("ours", other)]
        pairs = {"goodput": [figures.get("goodput") for figures in both]}
        for key, rank in itertools.product(("hang_to_step", "crash_to_step"), ("p50", "p95")):
            pairs[f"{key}_{rank}"] = [(figures.get(f"{key}_s") or {}).get(rank) for figures in both]
        for name, (mine, theirs) in pairs.items():
            found[f"{name}_of_{other}"] = round(mine / theirs, 3) if mine and theirs else None
    return found


def judge(results: dict[str, dict], comparison: dict[str, float | None]) -> list[str]:
    """The limits that are exceeded, one sentence each."""
    wrong = [
        f"{name}: {figures['right_result']} of {figures['runs']} runs ended with the right file"
        for name, figures in results.items()
        if "runs" in figures and figures["right_result"] < figures["runs"]
    ]
    ours = results.get("ours", {})
    if ours.get("unseen"):
        wrong.append(f"ours detected {ours['hangs'] - ours['unseen']} of {ours['hangs']} hangs")
    each = ours.get("each_run", [])
    values = comparison | {
        "detection_p95_s": (ours.get("detection_s") or {}).get("p95"),
        "repeated_for_each_fault": sum(r["repeated"] for r in each) / sum(r["faults"] for r in each) if each else None,
    }
    for name, (least, most) in LIMITS.items():
        value = values.get(name)
        if value is not None and not least <= value <= most:
            wrong.append(f"{name} is {value:.3g}, the limit is {least or most:g}")
    return wrong


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--faults", default=",".join(FAULTS), help="fault@step,… (names of benchmarks.injector)")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--limit", type=float, default=30.0, help="seconds after which an undetected fault is killed")
    parser.add_argument("--no-torch", action="store_true", help="a loop that does not import torch")


def measure(arguments: argparse.Namespace) -> Report:
    """All contenders in turn. Every run must end with the right file, and no limit be exceeded."""
    names = arguments.contenders.split(",")
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise CannotMeasure(f"no contender {unknown[0]!r}; there are: {', '.join(CONTENDERS)}")
    faults = tuple(filter(None, arguments.faults.split(",")))
    measured: dict[str, list[dict]] = {name: [] for name in names}
    results: dict[str, dict] = {}
    for number in range(arguments.repeats):
        for name in names if number % 2 == 0 else reversed(names):
            if name in results:
                continue
            try:
                run = one_run(CONTENDERS[name], arguments.steps, faults, arguments.limit, not arguments.no_torch)
            except CannotMeasure as reason:
                results[name] = {"not_measured": str(reason)}
                continue
            measured[name].append(run)
            say(f"{number + 1}/{arguments.repeats} {name}: {json.dumps(run)}")
    for name in names:
        if measured[name]:
            results[name] = summarize(CONTENDERS[name], measured[name])
    results = {name: results[name] for name in names}
    comparison = compare(results)
    setting = {"step_s": STEP_S, "steps": arguments.steps, "checkpoint_every": EVERY, "faults": list(faults)}
    setting |= {"limit_s": arguments.limit, "torch": not arguments.no_torch, "repeats": arguments.repeats}
    limits = {name: least or most for name, (least, most) in LIMITS.items()}
    figures = {"setting": setting, "contenders": results, "comparison": comparison, "limits": limits}
    return Report(figures, judge(results, comparison))
