"""Goodput under faults: the same loop, the same faults at the same steps, three supervisors.

    python -m benchmarks goodput [--json] [--repeats 3] [--steps 240] [--contenders ours,torchrun,ft_launcher] [--no-torch]
    python -m benchmarks goodput --contenders ours,no_standby,no_snapshots,neither
    python -m benchmarks goodput --contenders ours --against DIR      (DIR: a checkout of another commit)

Decision: the loop keeps a ledger, and every figure but one is computed from it, in the same way for every contender. The
exception is *detection* (fault → hang declared), which comes from the contender's own events or log. Contenders take turns,
so that a slow minute of the machine affects all of them.

A fault that a contender cannot detect would last forever. After `--limit` seconds the benchmark kills the process with
SIGKILL, as an operator would, counts the fault as `unseen`, and reports null for detection and recovery: the goodput of that
contender is then an upper bound that depends on the limit.

`--against` adds the monitor of another checkout as a contender, right after ours in each repeat. Each repeat is a pair; the
ratios ours / theirs are reported with their lowest and highest value.

Every loop imports torch at its start, as trainers do and as ft_launcher's client must; `--no-torch` omits it where the
contender allows.

ft_launcher gets its own environment, made on first use in the cache folder (`pip install nvidia-resiliency-ext`, 30 MB;
torch is the project's). Where it cannot be installed, the reason takes the place of its figures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import pairs, toy_loop
from benchmarks.goodput_contenders import AGAINST, CONTENDERS, PARTS, Contender, NotMeasured, another, begin, finish
from benchmarks.report import CannotMeasure, Report, say
from monitor.process import platform as processes

STEP_S = 0.05
EVERY = 20
FAULTS = ("step_sleeps@47", "sigkill@88", "sigstop@131", "raises@167", "gil_held@212")
DETECTION_LIMIT_S = 3.0
RATIOS = {  # ours / theirs: (the least, the most)
    "crash_to_step_p95_of_torchrun": (0.0, 0.35),
    "hang_to_step_p95_of_ft_launcher": (0.0, 0.5),
    "goodput_of_ft_launcher": (1.5, math.inf),
    "goodput_of_torchrun": (1.0, math.inf),
}
REPEATED_LIMIT = 1.0  # steps trained twice, for each fault
WHAT = (
    "One training loop under the same faults, three supervisors in turn. Seconds. p50 and p95 are nearest ranks over all faults "
    "of all runs, n says how many."
)
FIELDS = {
    "tuning": "what was set by hand for this loop",
    "detection_s": "from the fault to the supervisor's report of a hang; null: it never reported one",
    "hang_to_step_s": "from a hang to the first step that had not been trained before it",
    "crash_to_step_s": "the same from a crash",
    "repeated_steps": "steps trained more than once, a run",
    "goodput": "useful training time / wall time, start and end of the process included",
    "unseen": "hangs that the benchmark had to kill after `limit_s`, because the supervisor did not detect them",
    "goodput_depends_on_limit": "true: there were some, so the goodput is an upper bound",
    "right_result": "runs that ended with the file of an undisturbed run",
    "each_run": "the figures of each run",
}
HANGS = ("step_sleeps", "sigstop", "gil_held", "busy_loop", "lock_deadlock")
WALL_S = 600.0
"""A run that is not over by then counts as not finished."""


def read_ledger(path: Path) -> list[dict]:
    """What happened, in order, without a last line that is still being written."""
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def one_run(contender: Contender, steps: int, faults: tuple[str, ...], limit_s: float, torch: bool) -> dict:
    """Run a contender once, from its start to its end, and score it."""
    work = Path(tempfile.mkdtemp(prefix=f"goodput-{contender.name}-"))
    try:
        job = contender.start(work, steps, EVERY)
        token, ledger = secrets.token_hex(8), work / "ledger.jsonl"
        (work / "injected").mkdir()
        environment = {
            "TOY_RUN": token,
            "TOY_LEDGER": str(ledger),
            "TOY_FAULTS": ",".join(faults),
            "TOY_FAULTS_DONE": str(work / "injected"),
            "TOY_STEP_S": str(STEP_S),
            "TOY_TORCH": "1" if torch else "0",
            "TMPDIR": str(work / "tmp"),  # sockets, locks and heartbeats of this run alone
        }
        (work / "tmp").mkdir()
        begun_s = time.monotonic()
        process = begin(job, environment)
        try:
            unseen, ended = watch(process, ledger, limit_s, begun_s)
        finally:
            finish(process, token)
        wall_s = (ended or time.monotonic()) - begun_s
        loras = list(job.folder.glob("toy.safetensors"))
        return {
            **score(read_ledger(ledger), contender.noticed(job), steps, unseen, wall_s),
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
    """Wait for the end; the steps of the faults that had to be killed here, and when the contender ended (None: it did not)."""
    unseen: list[int] = []
    while process.poll() is None:
        if time.monotonic() - begun_s > WALL_S:
            return unseen, None
        time.sleep(0.05)
        lines = read_ledger(ledger)
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
    faults = [line for line in lines if line["what"] not in ("start", "resume", "step", "done")]
    detection: list[float] = []
    hang_to_step: list[float] = []
    crash_to_step: list[float] = []
    for fault in faults:
        later = [line["t"] for line in done if line["t"] > fault["t"] and line["step"] > fault["step"]]
        hang = fault["what"] in HANGS
        if fault["step"] in unseen or not later:
            continue
        (hang_to_step if hang else crash_to_step).append(min(later) - fault["t"])
        until = fault["wall"] + min(later) - fault["t"]
        declared = [t - fault["wall"] for t in noticed if fault["wall"] - 0.01 <= t <= until]
        if hang and declared:
            detection.append(max(0.0, min(declared)))
    return {
        "faults": len(faults),
        "hangs": sum(f["what"] in HANGS for f in faults),
        "unseen": len(unseen),
        "detection_s": detection,
        "hang_to_step_s": hang_to_step,
        "crash_to_step_s": crash_to_step,
        "repeated": len(done) - len({line["step"] for line in done}),
        "useful_s": STEP_S * len({line["step"] for line in done}),
        "wall_s": wall_s,
        "steps": len({line["step"] for line in done}),
    }


def percentile(values: list[float], share: float) -> float | None:
    """The value that `share` of them do not exceed (nearest rank), rounded to ms; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[max(0, -(-int(share * 100 * len(ordered)) // 100) - 1)], 3)


def spread(values: list[float]) -> dict | None:
    """p50, p95 and the number of values; None without any."""
    return {"p50": percentile(values, 0.5), "p95": percentile(values, 0.95), "n": len(values)} if values else None


def summarize(contender: Contender, runs: list[dict]) -> dict:
    """One contender's figures over all its runs."""

    def together(key: str) -> list[float]:
        return [value for run in runs for value in run[key]]

    unseen = sum(r["unseen"] for r in runs)
    return {
        "version": contender.version(),
        "tuning": contender.tuning,
        "runs": len(runs),
        "finished": sum(r["finished"] for r in runs),
        "right_result": sum(r["right"] for r in runs),
        "hangs": sum(r["hangs"] for r in runs),
        "unseen": unseen,
        "detection_s": spread(together("detection_s")),
        "hang_to_step_s": spread(together("hang_to_step_s")),
        "crash_to_step_s": spread(together("crash_to_step_s")),
        "repeated_steps": round(statistics.mean(r["repeated"] for r in runs), 1),
        "wall_s": round(statistics.mean(r["wall_s"] for r in runs), 2),
        "goodput": round(sum(r["useful_s"] for r in runs) / sum(r["wall_s"] for r in runs), 4),
        "goodput_depends_on_limit": unseen > 0,
        "each_run": runs,
    }


def compare(results: dict[str, dict]) -> dict[str, float | None]:
    """Ratios of ours to the others: failure → next new step (below 1: ours is faster) and goodput (above 1: ours is better)."""

    def ratio(key: str, rank: str | None, other: str) -> float | None:
        ours, theirs = (results.get(name, {}).get(key) for name in ("ours", other))
        if not ours or not theirs:
            return None
        return round(ours[rank] / theirs[rank] if rank else ours / theirs, 3)

    found = {
        "hang_to_step_p50_of_ft_launcher": ratio("hang_to_step_s", "p50", "ft_launcher"),
        "hang_to_step_p95_of_ft_launcher": ratio("hang_to_step_s", "p95", "ft_launcher"),
        "crash_to_step_p50_of_torchrun": ratio("crash_to_step_s", "p50", "torchrun"),
        "crash_to_step_p95_of_torchrun": ratio("crash_to_step_s", "p95", "torchrun"),
        "crash_to_step_p95_of_ft_launcher": ratio("crash_to_step_s", "p95", "ft_launcher"),
        "goodput_of_ft_launcher": ratio("goodput", None, "ft_launcher"),
        "goodput_of_torchrun": ratio("goodput", None, "torchrun"),
    }
    return {name: value for name, value in found.items() if name.rpartition("_of_")[2] in results}


def pair(results: dict[str, dict]) -> dict[str, pairs.Ratio]:
    """Ratios of ours to the other checkout (`--against`), each repeat a pair; {} without one."""
    ours, theirs = (results.get(name, {}).get("each_run", []) for name in ("ours", AGAINST))
    measures: dict[str, Callable[[dict], float | None]] = {
        "detection_s": lambda run: _median(run["detection_s"]),
        "hang_to_step_s": lambda run: _median(run["hang_to_step_s"]),
        "crash_to_step_s": lambda run: _median(run["crash_to_step_s"]),
        "goodput": lambda run: run["useful_s"] / run["wall_s"],
    }
    found = {}
    for name, measure in measures.items():
        ratio = pairs.ratio([(measure(a), measure(b)) for a, b in zip(ours, theirs, strict=False)])
        if ratio is not None:
            found[name] = ratio
    return found


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def judge(
    results: dict[str, dict], comparison: dict[str, float | None], paired: dict[str, pairs.Ratio] | None = None
) -> list[str]:
    """The limits that are exceeded, one sentence each."""
    wrong = [
        f"{name}: {figures['right_result']} of {figures['runs']} runs ended with the right file"
        for name, figures in results.items()
        if "runs" in figures and figures["right_result"] < figures["runs"]
    ]
    ours = results.get("ours", {})
    if ours.get("unseen"):
        wrong.append(f"ours detected {ours['hangs'] - ours['unseen']} of {ours['hangs']} hangs")
    if (seen := ours.get("detection_s")) and seen["p95"] > DETECTION_LIMIT_S:
        wrong.append(f"detection p95 is {seen['p95']} s, the limit is {DETECTION_LIMIT_S:g}")
    for name, ratio in (paired or {}).items():
        if pairs.worse(ratio, higher_is_better=name == "goodput"):
            wrong.append(f"{name} is worse than the other checkout's in every pair: {pairs.text(ratio)}")
    faults = sum(run["faults"] for run in ours.get("each_run", []))
    repeated = sum(run["repeated"] for run in ours.get("each_run", []))
    if repeated > REPEATED_LIMIT * faults:
        wrong.append(
            f"{repeated} steps were trained twice after {faults} faults, the limit is {REPEATED_LIMIT:g} for each"
        )
    for name, (least, most) in RATIOS.items():
        value = comparison.get(name)
        if value is not None and not least <= value <= most:
            wrong.append(f"{name} is {value}, the limit is {least or most:g}")
    return wrong


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--faults", default=",".join(FAULTS), help="fault@step,… (names of benchmarks.injector)")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--limit", type=float, default=30.0, help="seconds after which an undetected fault is killed")
    parser.add_argument("--against", type=Path, metavar="DIR", help="a checkout of another commit to compare with")
    parser.add_argument("--no-torch", action="store_true", help="a loop that does not import torch")


def measure(arguments: argparse.Namespace) -> Report:
    """All contenders in turn. Every run must end with the right file, and no limit be exceeded."""
    names, contenders = arguments.contenders.split(","), {**CONTENDERS, **PARTS}
    if arguments.against:
        contenders[AGAINST] = another(arguments.against.resolve())
        names.insert(names.index("ours") + 1 if "ours" in names else 0, AGAINST)
    if unknown := [name for name in names if name not in contenders]:
        raise CannotMeasure(f"no contender {unknown[0]!r}; there are: {', '.join(contenders)}")
    faults = tuple(filter(None, arguments.faults.split(",")))
    measured: dict[str, list[dict]] = {name: [] for name in names}
    results: dict[str, dict] = {}
    for number in range(arguments.repeats):
        for name in names if number % 2 == 0 else reversed(names):
            if name in results:
                continue
            try:
                run = one_run(contenders[name], arguments.steps, faults, arguments.limit, not arguments.no_torch)
            except NotMeasured as reason:
                results[name] = {"not_measured": str(reason)}
                continue
            measured[name].append(run)
            say(f"{number + 1}/{arguments.repeats} {name}: {json.dumps(run)}")
    for name in names:
        if measured[name]:
            results[name] = summarize(contenders[name], measured[name])
    results = {name: results[name] for name in names}
    comparison, paired = compare(results), pair(results)
    setting = {"step_s": STEP_S, "steps": arguments.steps, "checkpoint_every": EVERY, "faults": list(faults)}
    setting |= {"limit_s": arguments.limit, "torch": not arguments.no_torch, "repeats": arguments.repeats}
    limits = {
        "detection_p95_s": DETECTION_LIMIT_S,
        "repeated_for_each_fault": REPEATED_LIMIT,
        **{name: least or most for name, (least, most) in RATIOS.items()},
    }
    figures = {
        "what": WHAT,
        "fields": FIELDS,
        "setting": setting,
        "contenders": results,
        "comparison": comparison,
        "paired": paired,
        "limits": limits,
    }
    return Report(figures, judge(results, comparison, paired))
