"""The cost of the protection: a heartbeat in microseconds, all patches as a share of a training step, and the monitor.

Two real sd-scripts trainings, one plain and one with every patch, take their steps in turns, one step each, on the
same machine and with the same seed, so that other programs affect both equally. The overhead is the median of the
differences between neighbouring steps, in wall time and in processor time of the process (all its threads), with a 95
% bootstrap interval; also as a share of a 100 ms step, the shortest that FLUX is trained with. A second round swaps
who is first. On a busy machine the interval of the wall time may be too wide; `judged_by` then names the processor
time. Without sd-scripts only the parts and the monitor are measured.

The monitor watches a healthy run of the toy, made as a user makes one, at 20 steps a second. `monitor run` is two
processes: the monitor and its keeper, which restarts it. Their helpers (mostly the check of a checkpoint) are short
processes and are counted separately.

`python -m benchmarks overhead [--steps 200] [--monitor-seconds 30] [--json]`
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks import tiny_flux as tiny
from benchmarks.report import CannotMeasure, Report
from benchmarks.trial import ours, read_end, read_lines, started, toy_environment
from guards.reading import read_json
from runs.paths import ROOT

STEP_MS = 100.0
LIMITS = {
    "heartbeat_us": 2.0,
    "all_patches_share_of_100_ms": 0.01,
    "monitor_memory_mb": 40.0,
    "monitor_share_of_core": 0.005,  # at 20 steps a second
}
WARM_UP = 10  # steps of each run that are not counted: first batches, lazy imports
WATCHED_FROM = 60  # steps until the monitor is measured: it learns durations, opens files, checks the first checkpoint
START_S = 400.0  # on a loaded machine

TURNS = """
import os, time
real, steps = module.LossRecorder.add, int(os.environ["TURNS_STEPS"])
mine, others = (os.open(os.environ[name], os.O_RDWR) for name in ("TURNS_MINE", "TURNS_OTHERS"))
record = open(os.environ["TURNS_RECORD"], "w")
done, begun, cpu = 0, 0.0, 0.0
def add(self, *, epoch, step, loss):
    global done, begun, cpu
    real(self, epoch=epoch, step=step, loss=loss)
    if begun:
        record.write(f"{time.perf_counter() - begun} {time.process_time() - cpu}\\n")
        record.flush()
    done += 1
    if done > 1 or os.environ["TURNS_FIRST"] == "1":
        os.write(others, b".")
    if done < steps:
        os.read(mine, 1)
    begun, cpu = time.perf_counter(), time.process_time()
module.LossRecorder.add = add
"""


def microseconds(function: Callable[[], object], times: int = 2000, rounds: int = 60) -> float:
    """The best of many short rounds, so that other programs add little."""
    return min(timeit.repeat(function, number=times, repeat=rounds)) / times * 1e6


def parts(folder: Path) -> dict[str, float]:
    """Microseconds of each operation that happens once a step."""
    from guards.deadline import Deadline, bounded
    from guards.heartbeat import Heartbeat
    from guards.metrics import Metrics

    beat, metrics = Heartbeat(folder / "rank-0.hb"), Metrics(folder / "metrics.jsonl")

    def deadline() -> None:
        with Deadline(60, "nothing"):
            pass

    return {
        "heartbeat_step": microseconds(lambda: beat.step(7, epoch=1, loss=0.5, lr=1e-4)),
        "heartbeat_item": microseconds(lambda: beat.item(3)),
        "deadline": microseconds(deadline, 500),
        "metrics_line": microseconds(lambda: metrics.step(step=7, epoch=1, loss=0.5, lr=1e-4, step_s=0.1), 200),
        "bounded_read": microseconds(lambda: bounded(int, 30, "nothing"), 500),
    }


SIDES = ("plain", "patched")


def take_turns(
    work: Path, folder: Path, steps: int, second_first: bool, more: dict[str, str] | None = None, **changed: str
) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """(wall, processor) seconds of each step of the plain and the patched training, which alternate.

    more: variables of both, changed: flags of both. The losses of each are in `folder`/NAME.losses.
    """
    folder.mkdir()
    (folder / "turns.py").write_text(TURNS, encoding="utf-8")
    images = folder / "images" / f"{-(-steps // 10)}_thing"  # ten images, repeated so that one epoch is enough
    shutil.copytree(work / "images" / "1_thing", images)
    for name in SIDES:
        os.mkfifo(folder / f"{name}.turn")
    running = []
    home = "logging_util" if (tiny.checkout() / "library" / "logging_util.py").is_file() else "train_util"
    for number, name in enumerate(SIDES):
        (folder / name).mkdir()
        env = tiny.installation().environment(
            work,
            TINY_FAULTS=f"library.{home}={folder / 'turns.py'}",  # that has LossRecorder
            TURNS_STEPS=str(steps),
            TURNS_MINE=str(folder / f"{name}.turn"),
            TURNS_OTHERS=str(folder / f"{SIDES[1 - number]}.turn"),
            TURNS_RECORD=str(folder / f"{name}.txt"),
            TURNS_FIRST=str(int(bool(number) == second_first)),
            PYTHONPATH=f"{work / 'site'}{os.pathsep}{ROOT}",
            HANGPROOF_HEARTBEAT=str(folder / name / "hb"),
            HANGPROOF_RUN=str(folder / name),
            TINY_LOSSES=str(folder / f"{name}.losses"),
            **(more or {}),
        )
        args = tiny.arguments(
            work,
            folder / name,
            train_data_dir=str(images.parent),
            max_train_steps=str(steps),
            max_data_loader_n_workers="1",
            **changed,
        )
        command = tiny.command(*args, patched=name == "patched")
        with open(folder / f"{name}.log", "wb") as log:
            running.append(subprocess.Popen(command, env=env, cwd=tiny.checkout(), stdout=log, stderr=log))
    try:
        limit = time.monotonic() + 120 + steps * 2.0
        for process in running:
            process.wait(max(1.0, limit - time.monotonic()))
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, name in zip(running, SIDES, strict=True):
        if process.returncode:
            log_end = read_end(folder / f"{name}.log")
            raise RuntimeError(f"the {name} training ended with code {process.returncode}:\n{log_end}")
    first, second = (
        [tuple(map(float, line.split())) for line in (folder / f"{name}.txt").read_text().splitlines()[WARM_UP:]]
        for name in SIDES
    )
    return first, second


def compare(plain: list[float], patched: list[float]) -> dict[str, float]:
    """Medians and the median paired difference, in milliseconds, with its 95 % interval and share of a 100 ms step."""
    differences = [(b - a) * 1e3 for a, b in zip(plain, patched, strict=True)]
    draw = random.Random(0)
    redrawn = sorted(statistics.median(draw.choices(differences, k=len(differences))) for _ in range(2000))
    made = statistics.median(differences)
    return {
        "plain_ms": round(statistics.median(plain) * 1e3, 3),
        "patched_ms": round(statistics.median(patched) * 1e3, 3),
        "difference_ms": round(made, 3),
        "low_ms": round(redrawn[50], 3),
        "high_ms": round(redrawn[-51], 3),
        "share_of_100_ms": round(made / STEP_MS, 5),
    }


def real_loop(steps: int) -> dict[str, Any]:
    """Two rounds of turns on the tiny FLUX, or {"skipped": reason}."""
    missing = tiny.why_not() or ("" if hasattr(os, "mkfifo") else "no FIFOs on this platform")
    if missing:
        return {"skipped": missing}
    work = tiny.workdir()
    plain, patched = [], []
    with tempfile.TemporaryDirectory() as folder:
        for second_first in (False, True):
            one, other = take_turns(work, Path(folder) / str(second_first), steps, second_first)
            plain += one
            patched += other
    wall, cpu = (compare([x[i] for x in plain], [x[i] for x in patched]) for i in (0, 1))
    noisy = wall["high_ms"] - wall["low_ms"] > LIMITS["all_patches_share_of_100_ms"] * STEP_MS
    judged_by = "processor" if noisy else "wall"
    return {"pairs": len(plain), "wall": wall, "processor": cpu, "judged_by": judged_by}


def monitor(seconds: float) -> dict[str, float]:
    """Memory and processor share of the monitor and its keeper over so many seconds.

    The values that begin with keeper_ are of the keeper alone. Memory that both share counts once, where the system
    reports that (PSS, on Linux). RuntimeError: the run did not start.
    """
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        work = Path(folder)
        job = ours(work, steps=10_000_000, every=1000)
        with started(job, toy_environment(work)) as process:
            deadline = time.monotonic() + START_S
            while sum(line["what"] == "step" for line in read_lines(work / "ledger.jsonl")) < WATCHED_FROM:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the watched run did not reach step {WATCHED_FROM}:\n{read_end(job.log)}")
                time.sleep(0.5)
            keeper = psutil.Process(process.pid)
            both = psutil.Process((read_json(job.folder / "status.json") or {})["monitor_pid"]), keeper
            begun, helpers, before = time.monotonic(), both[0].cpu_times(), [_cpu_s(one) for one in both]
            memory = []
            while time.monotonic() - begun < seconds:
                time.sleep(1.0)
                memory.append([_memory(one) for one in both])
            after, took = both[0].cpu_times(), time.monotonic() - begun
            used = [_cpu_s(one) - was for one, was in zip(both, before, strict=True)]
    children = after.children_user + after.children_system - helpers.children_user - helpers.children_system
    return {
        "memory_mb": round(max(sum(sizes) for sizes in memory) / 1e6, 1),
        "share_of_core": round(sum(used) / took, 5),
        "keeper_memory_mb": round(max(sizes[1] for sizes in memory) / 1e6, 1),
        "keeper_share_of_core": round(used[1] / took, 5),
        "helpers_share_of_core": round(children / took, 5),
        "seconds": round(took, 1),
    }


def _memory(process: psutil.Process) -> int:
    """Bytes in memory; a page that several processes share counts in part."""
    full = process.memory_full_info()
    return int(getattr(full, "pss", 0) or full.rss)


def _cpu_s(process: psutil.Process) -> float:
    """Processor seconds of its threads, ended ones too. On Linux from its clock in nanoseconds, which never goes back:
    user and system time apart come in ticks of 10 ms, and their sum may fall."""
    if sys.platform == "linux":
        return time.clock_gettime(~process.pid << 3 | 2)  # as clock_getcpuclockid(3) makes it
    times = process.cpu_times()
    return times.user + times.system


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument(
        "--steps", type=int, default=200, help=f"of each training, in each of two rounds; more than {2 * WARM_UP} (200)"
    )
    parser.add_argument(
        "--monitor-seconds", type=float, default=30.0, help="how long the monitor is measured; 0: not at all (30)"
    )


def measure(args: argparse.Namespace) -> Report:
    """The parts, the monitor, and the real loop."""
    if args.steps <= 2 * WARM_UP:
        raise CannotMeasure(f"--steps must be more than {2 * WARM_UP}")
    with tempfile.TemporaryDirectory() as folder:
        costs = {name: round(value, 3) for name, value in parts(Path(folder)).items()}
    watching: dict[str, Any] = (
        monitor(args.monitor_seconds) if args.monitor_seconds else {"skipped": "--monitor-seconds 0"}
    )
    loop = real_loop(args.steps)
    share = loop[loop["judged_by"]]["share_of_100_ms"] if "judged_by" in loop else 0.0
    values = {
        "heartbeat_us": costs["heartbeat_step"],
        "all_patches_share_of_100_ms": share,
        "monitor_memory_mb": watching.get("memory_mb", 0.0),
        "monitor_share_of_core": watching.get("share_of_core", 0.0),
    }
    exceeded = [
        f"{name} is {value:g}, the limit is {LIMITS[name]:g}" for name, value in values.items() if value > LIMITS[name]
    ]
    figures = {"microseconds": costs, "monitor": watching, "loop": loop, "limits": LIMITS}
    return Report(figures, exceeded)
