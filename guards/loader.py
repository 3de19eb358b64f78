"""Which DataLoader settings cannot hang, as one pure function, and workers that do not outlive their trainer: the
sd-scripts patch and our own trainer share both.

A loader with workers and no timeout waits for ever for a worker that sleeps, so workers imply a timeout. A loader
without workers refuses persistent workers, prefetch and timeout, so no workers drop all three together. Windows and
macOS start workers by spawning; there, workers have hung after the first step often enough (kohya-ss/sd-scripts and
FluxGym issue trackers) that none is the rule.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def rules(
    num_workers: int,
    persistent_workers: bool = False,
    prefetch_factor: int | None = None,
    timeout: float = 0.0,
    pin_memory: bool = False,
    platform: str = sys.platform,
    cuda: bool = False,
) -> dict[str, object]:
    """Keyword arguments for `torch.utils.data.DataLoader` from those asked for. `timeout` in seconds.

    Returns num_workers, persistent_workers, prefetch_factor (None: torch's default), timeout, pin_memory.
    Raises ValueError for a negative number.
    """
    if num_workers < 0 or timeout < 0:
        raise ValueError(f"num_workers={num_workers}, timeout={timeout}: must not be negative")
    if platform in ("win32", "darwin"):
        num_workers = 0
    if num_workers == 0:
        persistent_workers, prefetch_factor, timeout = False, None, 0.0
    elif timeout == 0:
        timeout = 60.0
    return {
        "num_workers": num_workers,
        "persistent_workers": persistent_workers,
        "prefetch_factor": prefetch_factor,
        "timeout": timeout,
        "pin_memory": pin_memory or cuda,
    }


def die_with_parent(_: int = 0) -> None:
    """Called in a worker: Linux kills it when its parent dies, however that comes. A `worker_init_fn`; elsewhere it does nothing.

    A worker whose sibling was killed may wait for ever for a lock that the dead one holds, and keep the log's pipe open.
    The signal is sent when the *thread* that started the worker exits, so only for workers that a main thread started.
    """
    if sys.platform != "linux":
        return
    parent = multiprocessing.parent_process()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # it died before we could ask
