"""Copies tensors in the machine's memory with several threads.

Decision: one core alone mostly waits for the memory, and torch copies tensors of a LoRA's size with one. On two cores, 100 MB took
35 ms with one thread and 14 ms with two. Python's threads do, because torch releases the interpreter's lock while it copies.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

MOST_THREADS = 4  # more hardly get more from the memory
PIECES = 4  # for each thread, so that a core that other programs use holds the rest up for a short while only
ONE_THREAD = 1 << 20  # bytes; fewer are copied before a second thread has begun


def copy(targets: list[Any], sources: list[Any], size: int) -> float:
    """Copy each tensor into the one at the same place in `targets`, which has the same shape and type and is in the machine's memory.

    size: bytes of all together.
    Returns the processor time of the other threads in seconds, divided by their number; 0 where this thread has copied.
    """
    threads = min(MOST_THREADS, _cores())
    if threads == 1 or size < ONE_THREAD or any(source.device.type != "cpu" for source in sources):
        in_this_thread(targets, sources)
        return 0.0
    count = threads * PIECES
    cuts = [len(sources) * number // count for number in range(count + 1)]
    parts = [slice(begin, end) for begin, end in pairwise(cuts)]
    return sum(_pool(threads).map(lambda part: _timed(targets[part], sources[part]), parts)) / threads


def in_this_thread(targets: list[Any], sources: list[Any], non_blocking: bool = False) -> None:
    """Copy as `copy` does, from any device. non_blocking: those from a GPU into pinned memory are on their way when this returns."""
    import torch

    together = getattr(torch, "_foreach_copy_", None)  # since torch 2.1
    with torch.no_grad():
        if together is not None and targets:
            together(targets, sources, non_blocking=non_blocking)
        else:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=non_blocking)


def _timed(targets: list[Any], sources: list[Any]) -> float:
    began_s = time.thread_time()
    in_this_thread(targets, sources)
    return time.thread_time() - began_s


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="hangproof-copy")


def _cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
