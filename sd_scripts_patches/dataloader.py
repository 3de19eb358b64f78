"""Every wait for a batch has a limit.

The settings are changed in `DataLoader.__init__` (the class itself stays: accelerate copies a loader's settings and
uses isinstance), so a loader with workers always has a timeout, and one without workers never has the settings that
torch refuses. A deadline of our own surrounds each batch. torch's timeout alone is not enough: it does not fire while
the parent is in `resource_sharer.get_connection` for a tensor of a stopped worker (measured), it does not exist for a
loader without workers, and its message names neither batch nor worker. The first batch of an iterator has a longer
limit: workers start, and import torch when they are spawned.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from guards import limits, loader
from sd_scripts_patches import session
from sd_scripts_patches.patch import Patch, around, function

MODULE = "torch.utils.data.dataloader"


def _safe_settings(original: Callable) -> Callable:
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        workers = given.get("num_workers", 0)
        safe = loader.rules(
            num_workers=workers,
            persistent_workers=given.get("persistent_workers", False),
            prefetch_factor=given.get("prefetch_factor"),
            timeout=given.get("timeout", 0),
        )
        safe["pin_memory"] = given.get("pin_memory", False) or torch.cuda.is_available()
        if safe["num_workers"] != workers:
            session.log(f"data loader: {safe['num_workers']} workers instead of {workers} on {sys.platform}")
        given.update({name: value for name, value in safe.items() if name in signature.parameters})
        original(*bound.args, **bound.kwargs)

    return __init__


@around
def _start_workers(original: Callable, self: Any) -> Iterator[Any]:
    with session.limit("dataloader_first_batch_s", f"{self.num_workers} data loader workers to start"):
        return original(self)


@around
def _batch_from_workers(original: Callable, self: Any) -> Any:
    number = self._num_yielded + 1
    limit = limits.seconds("dataloader_timeout_s")
    if number == 1 and limit:
        first = limits.seconds("dataloader_first_batch_s")
        limit = first and max(limit, first)
    task = self._task_info.get(self._rcvd_idx)
    worker = f"worker {task[0]} (pid {self._workers[task[0]].pid})" if task else "its workers"
    # torch's timeout comes later than our deadline, whose message names batch and worker; 0 is none for torch as well.
    self._timeout = limit and limit + limits.seconds("loader_margin_s")
    return _within_limit(original, self, limit, f"batch {number} of the data loader from {worker}")


@around
def _batch_without_workers(original: Callable, self: Any) -> Any:
    what = f"batch {self._num_yielded + 1} of the data loader (no workers: the trainer itself reads it)"
    return _within_limit(original, self, limits.seconds("dataloader_first_batch_s"), what)


def _within_limit(original: Callable, iterator: object, limit_s: float, what: str) -> Any:
    """Return one batch within `limit_s` seconds. An error is logged with the batch's name before it propagates."""
    began_s = time.monotonic()
    with session.Deadline(limit_s, what):
        try:
            return original(iterator)
        except StopIteration:
            raise
        except Exception as error:
            session.log(f"{what} failed: {type(error).__name__}")
            raise
        finally:
            session.heartbeat().waited(time.monotonic() - began_s)


PATCH = Patch(
    name="dataloader",
    why="when a worker sleeps or is stopped, the next batch never arrives",
    targets=(
        function(MODULE, "DataLoader.__init__(self, dataset, batch_size, shuffle)", _safe_settings),
        function(MODULE, "DataLoader.__iter__(self)", _start_workers),
        function(MODULE, "_MultiProcessingDataLoaderIter._next_data(self)", _batch_from_workers),
        function(MODULE, "_SingleProcessDataLoaderIter._next_data(self)", _batch_without_workers),
    ),
)
