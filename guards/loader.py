"""Which DataLoader settings cannot hang, as one pure function: the sd-scripts patch and our own trainer share it.

A loader with workers and no timeout waits for ever for a worker that sleeps, so workers imply a timeout. A loader
without workers refuses persistent workers, prefetch and timeout, so no workers drop all three together. Windows and
macOS start workers by spawning; there, workers have hung after the first step often enough (kohya-ss/sd-scripts and
FluxGym issue trackers) that none is the rule.
"""

from __future__ import annotations

import sys


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
