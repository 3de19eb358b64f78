"""What the monitor costs while it watches a healthy run at 20 steps a second: memory, and a share of one core.

The run is made as a user makes one and started by `monitor run`; only its trainer is the toy loop. `monitor run` is two
processes: the monitor and its keeper, which restarts it. Their helpers (mostly the check of a checkpoint) are short
processes and are counted separately.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks import pairs
from benchmarks.goodput import read_ledger
from benchmarks.goodput_contenders import begin, finish, ours
from runs.paths import ROOT

STEP_S = 0.05
SAVE_EVERY = 1000
WARM_UP_STEPS = 60  # the monitor learns durations, opens files, checks the first checkpoint
START_S = 400.0  # on a loaded machine


def measure(seconds: float, root: Path = ROOT) -> dict[str, float]:
    """Memory and processor share over so many seconds. `root`: the checkout whose monitor runs.

    Returns:
        memory_mb and share_of_core of the monitor and its keeper together, keeper_memory_mb and keeper_share_of_core of the
        keeper alone (0 without one), helpers_share_of_core, seconds. Memory that both share counts once, where the system
        reports that (PSS, on Linux).

    Raises:
        RuntimeError: the run did not start.
    """
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        work, token = Path(folder), secrets.token_hex(8)
        job = ours(work, steps=10_000_000, every=SAVE_EVERY, root=root)
        ledger = work / "ledger.jsonl"
        (work / "tmp").mkdir()
        environment = {"TOY_RUN": token, "TOY_LEDGER": str(ledger), "TOY_STEP_S": str(STEP_S), "TMPDIR": f"{work}/tmp"}
        process = begin(job, environment)
        try:
            deadline = time.monotonic() + START_S
            while sum(line["what"] == "step" for line in read_ledger(ledger)) < WARM_UP_STEPS:
                if process.poll() is not None or time.monotonic() > deadline:
                    output = job.log.read_text(encoding="utf-8", errors="replace")[-2000:]
                    raise RuntimeError(f"the watched run did not reach step {WARM_UP_STEPS}:\n{output}")
                time.sleep(0.5)
            monitor = psutil.Process(_monitor_pid(job.folder) or process.pid)
            keeper = psutil.Process(process.pid) if monitor.pid != process.pid else None
            begun, before = time.monotonic(), monitor.cpu_times()
            own_before, keeper_before = _cpu_s(monitor), _cpu_s(keeper) if keeper else 0.0
            memory, keeper_memory = [0], [0]
            while time.monotonic() - begun < seconds:
                time.sleep(1.0)
                keeper_memory.append(_memory(keeper) if keeper else 0)
                memory.append(_memory(monitor) + keeper_memory[-1])
            after, took = monitor.cpu_times(), time.monotonic() - begun
            keeper_s = _cpu_s(keeper) - keeper_before if keeper else 0.0
            own = _cpu_s(monitor) - own_before + keeper_s
        finally:
            finish(process, token)
    helpers = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "memory_mb": round(max(memory) / 1e6, 1),
        "share_of_core": round(own / took, 5),
        "keeper_memory_mb": round(max(keeper_memory) / 1e6, 1),
        "keeper_share_of_core": round(keeper_s / took, 5),
        "helpers_share_of_core": round(helpers / took, 5),
        "seconds": round(took, 1),
    }


def compare(seconds: float, root: Path, number: int = 3) -> dict[str, pairs.Ratio]:
    """Ratios ours / theirs of `number` pairs, measured in turns; the second pair swaps who is first."""
    measured: list[tuple[dict[str, float], dict[str, float]]] = []
    for turn in range(number):
        first, second = (ROOT, root) if turn % 2 == 0 else (root, ROOT)
        found = {first: measure(seconds, first), second: measure(seconds, second)}
        measured.append((found[ROOT], found[root]))
    ratios = {}
    for key in ("memory_mb", "share_of_core", "helpers_share_of_core"):
        ratio = pairs.ratio((a[key], b[key]) for a, b in measured)
        if ratio is not None:
            ratios[key] = ratio
    return ratios


def _memory(process: psutil.Process) -> int:
    """Bytes in memory; a page that several processes share counts in part."""
    full = process.memory_full_info()
    return int(getattr(full, "pss", 0) or full.rss)


def _cpu_s(process: psutil.Process) -> float:
    """Processor seconds of all its threads, ended ones too. On Linux from its clock in nanoseconds, which never goes back:
    user and system time apart come in ticks of 10 ms, and their sum may fall."""
    if sys.platform == "linux":
        return time.clock_gettime(~process.pid << 3 | 2)  # as clock_getcpuclockid(3) makes it
    times = process.cpu_times()
    return times.user + times.system


def _monitor_pid(folder: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / "status.json").read_text(encoding="utf-8")).get("monitor_pid")
    return None
