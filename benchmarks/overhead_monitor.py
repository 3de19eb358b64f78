"""What the monitor itself costs while it watches a healthy run at 20 steps a second: memory, and a share of one core.

A run as a user makes one, by `monitor run`; only its trainer is the toy loop. Its helpers (the check of a checkpoint,
mostly) are short processes of their own and are counted apart.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from pathlib import Path

from benchmarks.goodput import read_ledger
from benchmarks.goodput_contenders import begin, finish, ours

STEP_S = 0.05
SAVE_EVERY = 1000
WARM_UP_STEPS = 60  # the first looks learn, open files, check the first checkpoint
START_S = 400.0  # on a loaded machine


def measure(seconds: float) -> dict[str, float]:
    """{"memory_mb", "share_of_core", "helpers_share_of_core", "seconds"} over so many seconds; RuntimeError: no run."""
    import psutil

    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        work, token = Path(folder), secrets.token_hex(8)
        job = ours(work, steps=10_000_000, every=SAVE_EVERY)
        ledger = work / "ledger.jsonl"
        (work / "tmp").mkdir()
        environment = {"TOY_RUN": token, "TOY_LEDGER": str(ledger), "TOY_STEP_S": str(STEP_S), "TMPDIR": f"{work}/tmp"}
        process = begin(job, environment)
        try:
            deadline = time.monotonic() + START_S
            while sum(line["what"] == "step" for line in read_ledger(ledger)) < WARM_UP_STEPS:
                if process.poll() is not None or time.monotonic() > deadline:
                    said = job.log.read_text(encoding="utf-8", errors="replace")[-2000:]
                    raise RuntimeError(f"the watched run did not come to step {WARM_UP_STEPS}:\n{said}")
                time.sleep(0.5)
            watcher = psutil.Process(process.pid)
            before, begun = watcher.cpu_times(), time.monotonic()
            memory = []
            while time.monotonic() - begun < seconds:
                time.sleep(1.0)
                memory.append(watcher.memory_info().rss)
            after, took = watcher.cpu_times(), time.monotonic() - begun
        finally:
            finish(process, token)
    own = after.user + after.system - before.user - before.system
    helpers = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "memory_mb": round(max(memory) / 1e6, 1),
        "share_of_core": round(own / took, 5),
        "helpers_share_of_core": round(helpers / took, 5),
        "seconds": round(took, 1),
    }
