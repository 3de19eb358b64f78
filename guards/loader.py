"""DataLoader settings that cannot hang, as one pure function, and workers that die with their trainer.

The sd-scripts patch and the built-in trainer share both. A loader with workers and no timeout waits for ever for a
worker that sleeps, so workers imply a timeout. A loader without workers refuses persistent workers, prefetch and a
timeout, so without workers all three are dropped. Windows and macOS spawn workers, and there they often hung after the
first step (issue trackers of kohya-ss/sd-scripts and FluxGym), so there are none on these platforms.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import threading

from guards import limits

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
    """Safe keyword arguments for `torch.utils.data.DataLoader`, from the requested ones. `timeout` in seconds.

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
        timeout = limits.TABLE["dataloader_timeout_s"].default_s
    return {
        "num_workers": num_workers,
        "persistent_workers": persistent_workers,
        "prefetch_factor": prefetch_factor,
        "timeout": timeout,
        "pin_memory": pin_memory or cuda,
    }


def die_with_parent(_: int = 0) -> None:
    """Have Linux kill this worker when its trainer dies. A `worker_init_fn`; does nothing on other platforms.

    Without it, a worker whose sibling was killed may wait for ever for a lock that the dead one holds, and it keeps the
    pipe of the log open. The kernel sends the signal when the *thread* that started this process exits, so call this
    only in workers that a main thread started. Under the start method forkserver (the default of Python 3.14) the
    parent in the kernel's sense is the fork server; a thread of the worker then waits for the trainer's death instead.
    """
    if sys.platform != "linux":
        return
    trainer = multiprocessing.parent_process()
    if trainer is None:
        return
    if os.getppid() == trainer.pid:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != trainer.pid:
            os._exit(1)  # the trainer died before the call
    else:
        threading.Thread(target=_exit_after, args=(trainer,), name="hangproof-parent", daemon=True).start()


def _exit_after(trainer: multiprocessing.process.BaseProcess) -> None:
    trainer.join()  # waits on a pipe that closes with the trainer
    os._exit(1)
