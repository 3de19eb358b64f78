"""Copies many tensors of the machine's memory into one block of it, with several threads.

Decision: for 100 MB in tensors of a LoRA's size, torch's copy takes 35 ms, `memmove` 20 with one thread and about 11 with two (two
cores of a virtual machine). The thread that calls takes part: it keeps its core, and the others find free ones. In a process that was
started with `environment` it is 6: glibc then uses non-temporal stores, which bypass the caches and do not read first what they
overwrite.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

MOST_THREADS = 4  # more hardly get more from the memory
SEVERAL = 1 << 20  # bytes; fewer are copied before a second thread begins
PIECE = 16  # tensors that a thread copies before it asks for more
TUNABLES = "GLIBC_TUNABLES"  # gnu.org/software/libc/manual/html_node/Tunables.html
NON_TEMPORAL = "glibc.cpu.x86_non_temporal_threshold"
NON_TEMPORAL_BYTES = 32 << 10  # a matrix of a LoRA of rank 4 on FLUX has 48 KB


@dataclass(frozen=True)
class Target:
    """Where tensors are copied to. Made once and used often, because asking a tensor for its address takes time."""

    tensors: list[Any]
    ranges: list[tuple[int, int]]  # address and bytes of each; no bytes for one that is not contiguous

    @classmethod
    def of(cls, tensors: list[Any]) -> Target:
        """These tensors, which stay where they are in the machine's memory."""
        return cls(tensors, [(t.data_ptr(), t.nbytes if t.is_contiguous() else 0) for t in tensors])


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What makes the copy faster in a process that is started with it; {} without glibc on x86-64. A user's own value stays.

    It has a price: a numpy array that is copied and then read comes from memory instead of a cache, which takes 50 µs longer for
    256 KB. So it is for a training that waits for the copy, which one on a GPU does not.
    """
    known = environ.get(TUNABLES, "")
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc" or NON_TEMPORAL in known:
        return {}
    return {TUNABLES: ":".join(filter(None, [known, f"{NON_TEMPORAL}={NON_TEMPORAL_BYTES}"]))}


def copy(target: Target, sources: list[Any]) -> None:
    """Copy each tensor into the one at the same place in `target`, which has the same type and shape. sources: on any device.

    Raises:
        ValueError: `target` has not as many.
        RuntimeError: torch's, for a tensor that is not simply a range of memory.
    """
    moves, others = [], []
    for (to, size), source, place in zip(target.ranges, sources, target.tensors, strict=True):
        is_range = size == source.nbytes and source.is_contiguous() and source.is_cpu
        if is_range and not source.is_neg() and not source.is_conj():
            moves.append((to, source.data_ptr(), size))
        else:
            others.append((place, source))
    pieces = deque(moves[begin : begin + PIECE] for begin in range(0, len(moves), PIECE))
    helpers = min(MOST_THREADS, _cores()) - 1 if sum(size for _, _, size in moves) >= SEVERAL else 0
    waiting = [_pool().submit(_move, pieces, target, sources) for _ in range(helpers)]
    try:
        _move(pieces)
    finally:  # also when a signal's handler raises
        pieces.clear()
        for helper in waiting:
            helper.result()
    if others:
        import torch

        with torch.no_grad():
            for place, source in others:
                place.copy_(source)


def _move(pieces: deque[list[tuple[int, int, int]]], *owners: object) -> None:
    """Copy pieces (address of the target, of the source, bytes) until none is left. owners: of the memory, kept as long as this runs."""
    with contextlib.suppress(IndexError):  # another thread has taken the last one
        while True:
            for to, source, size in pieces.popleft():
                ctypes.memmove(to, source, size)  # releases the interpreter's lock


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix="hangproof-copy")


def _cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
