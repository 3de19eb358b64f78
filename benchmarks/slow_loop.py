"""A trainer whose steps do what SLOW_WORK says, a JSON file that is read again before each step: the benchmark makes it slow.

Keys (all optional): sleep_s (the GPU's part of a step), cpu (rounds of hashing), read_mb (past the page cache), touch_mb (of its own memory),
map_mb (of a mapped file), load_s (of a data loader, by a worker process), sizes (factors of sleep_s, in turn); and every so many steps
sample, save, validate (seconds, as phases) and epoch (its first step takes epoch_s more: the workers start).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from guards import crash
from guards.heartbeat import REQUEST_STOP, Heartbeat

MIB, PAGE = 1 << 20, 4096
MAPPED_PAGES = 4000  # of the mapped file in a step: the kernel reads a few hundred dropped ones a second
WORK = Path(os.environ["SLOW_WORK"])


def burn(rounds: int) -> None:
    """Use the processor for so many rounds."""
    for _ in range(rounds):
        hashlib.sha256(bytes(MIB)).digest()


def read_past_cache(path: Path, size: int) -> None:
    """Read `size` bytes from the disk itself."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, MIB)  # aligned, as O_DIRECT wants it
    try:
        for at in range(0, size, MIB):
            os.preadv(descriptor, [buffer], at)
    finally:
        os.close(descriptor)


def touch(memory: Any, size: int, most: int = 1 << 30) -> None:
    """Use one byte of each page, or of `most` of them, in a random order."""
    pages = range(0, size, PAGE)
    for at in random.sample(pages, min(most, len(pages))):
        memory[at]


class Waiting:
    """A data set whose items take their worker process `load_s` seconds each, as SLOW_WORK says."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        time.sleep(json.loads(WORK.read_text()).get("load_s", 0.0))
        return index


def make_batches() -> Any:
    """An iterator of a real DataLoader with one worker."""
    from torch.utils.data import DataLoader

    return iter(DataLoader(Waiting(), batch_size=None, num_workers=1, prefetch_factor=1))


def main() -> int:
    """Train until the monitor requests a stop, or for `steps` steps."""
    beat = Heartbeat.from_env(rank=0)
    crash.install(beat)
    beat.phase("load")
    work: dict[str, Any] = json.loads(WORK.read_text())
    batches = make_batches() if "load_s" in work else None
    memory = bytearray(random.randbytes(PAGE) * (work.get("touch_mb", 0) * MIB // PAGE))
    file = WORK.with_name("data.bin")
    mapped = None
    if work.get("map_mb"):
        with open(file, "rb") as source:
            mapped = mmap.mmap(source.fileno(), work["map_mb"] * MIB, prot=mmap.PROT_READ)
    phases: dict[str, Callable[[], None]] = {
        name: lambda name=name: time.sleep(work[f"{name}_s"])  # type: ignore[misc]
        for name in ("sample", "save", "validate")
    }
    beat.plan(work.get("steps", 1_000_000))
    beat.phase("first_step")
    step = 0
    while step < work.get("steps", 1_000_000) and beat.request != REQUEST_STOP:
        work |= json.loads(WORK.read_text())
        if batches is not None:
            began_s = time.monotonic()
            next(batches)
            beat.waited(time.monotonic() - began_s)
        sizes = work.get("sizes") or [1]
        time.sleep(work.get("sleep_s", 0.0) * sizes[step * 7919 % len(sizes)])
        burn(work.get("cpu", 0))
        if work.get("read_mb"):
            read_past_cache(file, work["read_mb"] * MIB)
        touch(memory, len(memory))
        if mapped is not None:
            touch(mapped, len(mapped), MAPPED_PAGES)
        if work.get("epoch") and step % work["epoch"] == 0:
            time.sleep(work["epoch_s"])
        step += 1
        beat.step(step, epoch=1 + step // work.get("epoch", 1_000_000), loss=1.0)
        for name, act in phases.items():
            if work.get(name) and step % work[name] == 0:
                beat.phase(name)
                act()
                beat.phase("step")
    beat.end("done" if beat.request != REQUEST_STOP else "stopped")
    return 0 if beat.request != REQUEST_STOP else crash.EXIT_STOPPED


if __name__ == "__main__":
    crash.exit_now(main())
