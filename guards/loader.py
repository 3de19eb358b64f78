"""Loader workers that cannot hang: their settings, as one pure function, and their death with the trainer.

The sd-scripts patch and the built-in trainer share these. A loader with workers and no timeout waits for ever for a
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
    num_workers: int, persistent_workers: bool = False, prefetch_factor: int | None = None, timeout: float = 0.0
) -> dict[str, object]:
    """Safe keyword arguments for `torch.utils.data.DataLoader`, from the requested ones.

    timeout: seconds, 0 for the limit `dataloader_timeout_s`. prefetch_factor: None for torch's default.
    """
    if num_workers == 0 or sys.platform in ("win32", "darwin"):
        return {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None, "timeout": 0.0}
    return {
        "num_workers": num_workers,
        "persistent_workers": persistent_workers,
        "prefetch_factor": prefetch_factor,
        "timeout": timeout or limits.seconds("dataloader_timeout_s"),
    }


def die_with_parent(_: int = 0) -> None:
    """Have Linux kill this worker when its trainer dies, and not before. A `worker_init_fn`; does nothing elsewhere.

    Without it, a worker whose sibling was killed may wait for ever for a lock that the dead one holds, and it keeps the
    pipe of the log open. The kernel sends the signal when the *thread* that started this process exits, so call this
    only in workers that a main thread started. Under the start method forkserver (the default of Python 3.14) the
    parent in the kernel's sense is the fork server; a thread of the worker then waits for the trainer's death instead.

    A machine that shuts down sends SIGTERM to the worker, too. The trainer then completes its step and saves a state,
    and may need more batches for that: only the trainer's own SIGTERM ends the worker.
    """
    trainer = multiprocessing.parent_process() if sys.platform == "linux" else None
    if trainer is None:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_exit_at_term_of, args=(trainer.pid,), name="hangproof-term", daemon=True).start()
    if os.getppid() == trainer.pid:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != trainer.pid:
            os._exit(1)  # the trainer died before the call
    else:
        threading.Thread(target=_exit_after, args=(trainer,), name="hangproof-parent", daemon=True).start()


def _exit_at_term_of(trainer: int | None) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != trainer:
        pass
    os._exit(0)


def _exit_after(trainer: multiprocessing.process.BaseProcess) -> None:
    trainer.join()  # waits on a pipe that closes with the trainer
    os._exit(1)
