"""No batch is waited for without end.

The settings go in at `DataLoader.__init__` (the class itself stays: accelerate copies a loader's settings and tests by
isinstance), so a loader with workers always has a timeout and one without never has the settings it would refuse. Each
batch then has a deadline of our own around it. Why not torch's timeout alone: it does not fire while the parent sits in
`resource_sharer.get_connection` for a tensor of a stopped worker (measured), it does not exist for a loader without
workers, and its message names neither batch nor worker. The first batch of an iterator has a longer budget: workers
start, and import torch where they are spawned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

from sd_scripts_patches import session, timeouts
from sd_scripts_patches.patch import Patch, Target, wrap

MODULE = "torch.utils.data.dataloader"
LATER_S = 5.0
"""How much later than our deadline torch's own timeout is: ours says what was waited for, so it comes first."""


def apply(module: ModuleType) -> None:
    """Settings for every loader, a deadline for every batch."""
    wrap(module, "DataLoader.__init__", _settings)
    wrap(module, "DataLoader.__iter__", _start)
    wrap(module, "_MultiProcessingDataLoaderIter._next_data", _from_workers)
    wrap(module, "_SingleProcessDataLoaderIter._next_data", _from_here)


def _settings(original: Callable) -> Callable:
    import inspect

    from guards import loader

    signature = inspect.signature(original)

    def __init__(self, *args, **kwargs):
        import torch

        bound = signature.bind(self, *args, **kwargs)
        asked = bound.arguments
        workers = asked.get("num_workers", 0)
        limit = timeouts.seconds("dataloader_timeout_s") if workers else 0.0
        safe = loader.rules(
            num_workers=workers,
            persistent_workers=asked.get("persistent_workers", False),
            prefetch_factor=asked.get("prefetch_factor"),
            timeout=asked.get("timeout", 0) or limit,
            pin_memory=asked.get("pin_memory", False),
            platform=sys.platform,
            cuda=torch.cuda.is_available(),
        )
        if workers and not limit:
            safe["timeout"] = asked.get("timeout", 0)  # switched off by the user
        if safe["num_workers"] != workers:
            session.say(f"data loader: {workers} workers asked for, {safe['num_workers']} used on {sys.platform}")
        asked.update({name: value for name, value in safe.items() if name in signature.parameters})
        original(*bound.args, **bound.kwargs)

    return __init__


def _start(original: Callable) -> Callable:
    def __iter__(self):
        with session.within("dataloader_first_batch_s", f"{self.num_workers} data loader workers to start"):
            return original(self)

    return __iter__


def _from_workers(original: Callable) -> Callable:
    def _next_data(self):
        number = self._num_yielded + 1
        limit = timeouts.seconds("dataloader_timeout_s")
        if number == 1:
            limit = max(limit, timeouts.seconds("dataloader_first_batch_s")) if limit else limit
        task = self._task_info.get(self._rcvd_idx)
        worker = f"worker {task[0]} (pid {self._workers[task[0]].pid})" if task else "its workers"
        if limit:
            self._timeout = limit + LATER_S
        return _bounded(original, self, limit, f"batch {number} of the data loader from {worker}")

    return _next_data


def _from_here(original: Callable) -> Callable:
    def _next_data(self):
        what = f"batch {self._num_yielded + 1} of the data loader (no workers: read by the trainer itself)"
        return _bounded(original, self, timeouts.seconds("dataloader_first_batch_s"), what)

    return _next_data


def _bounded(original: Callable, iterator: object, limit: float, what: str) -> object:
    """One batch within `limit` seconds; an error on the way is said with the batch's name before it goes on."""
    with session.Deadline(limit, what):
        try:
            return original(iterator)
        except StopIteration:
            raise
        except Exception as error:
            session.say(f"{what} could not be had: {type(error).__name__}")
            raise


PATCH = Patch(
    name="dataloader",
    why="a worker that sleeps or is stopped: the next batch never comes",
    targets=(
        Target(MODULE, "DataLoader.__init__", params=("self", "dataset", "batch_size", "shuffle")),
        Target(MODULE, "DataLoader.__iter__", params=("self",)),
        Target(MODULE, "_MultiProcessingDataLoaderIter._next_data", params=("self",)),
        Target(MODULE, "_SingleProcessDataLoaderIter._next_data", params=("self",)),
    ),
    apply={MODULE: apply},
)
