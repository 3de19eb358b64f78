"""This process's heartbeat and metrics, and the end of the process: one of each, shared by all patches.

Loader workers are other processes: whether forked or spawned they get a heartbeat that writes nowhere, because two
writers on one record would tear it, and a worker's progress is not the run's.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from guards import crash, deadline
from guards.deadline import Deadline
from guards.heartbeat import Heartbeat
from guards.metrics import Metrics
from sd_scripts_patches import timeouts

_heartbeat: Heartbeat | None = None
_metrics: Metrics | None = None
_phase_left_s = 0.0
at_step: list[Callable[[int], None]] = []
"""Called with the number of each optimizer step that is done."""
after_batch: list[Callable[[], None]] = []
"""Called when all that belongs to a batch is done, its samples and saves too: where a loop may be left."""


def start() -> None:
    """Begin the record of this training process: phase "import", stacks on a signal, last words on an uncaught error."""
    global _heartbeat, _metrics
    _heartbeat, _metrics = Heartbeat.from_env(), Metrics.from_env()
    deadline.use_heartbeat(_heartbeat)
    crash.install(_heartbeat)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_be_a_worker)
    _heartbeat.phase("import")


def heartbeat() -> Heartbeat:
    """The heartbeat of this process; one that writes nowhere in a worker, and where none was started."""
    global _heartbeat
    if _heartbeat is None:
        _heartbeat = Heartbeat(None)
    return _heartbeat


def metrics() -> Metrics:
    """The metrics of this process; rank 0 alone writes steps."""
    global _metrics
    if _metrics is None or heartbeat().rank != 0:
        _metrics = Metrics(None)
    return _metrics


@contextlib.contextmanager
def phase(name: str, total: int = 0, note: str = "") -> Iterator[Heartbeat]:
    """The heartbeat is in phase `name` inside, and back in the phase it was in before afterwards. May nest."""
    beat = heartbeat()
    before = beat.current_phase
    beat.phase(name, total=total, note=note)
    yield beat
    beat.phase(before)  # after an error the phase stays: it is where the run ended
    global _phase_left_s
    _phase_left_s = time.monotonic()


def phase_left_s() -> float:
    """When a nested phase (sampling, saving…) was last left; monotonic seconds."""
    return _phase_left_s


def within(name: str, what: str) -> Deadline:
    """The deadline `name` of timeouts.py for `what`; it ends the process."""
    return Deadline(timeouts.seconds(name), what)


def say(message: str) -> None:
    """A line of ours in the training log, written at once: loader workers write to the same file."""
    sys.stderr.write(f"hangproof: {message}\n")
    sys.stderr.flush()


def _be_a_worker() -> None:
    global _heartbeat, _metrics
    _heartbeat, _metrics = Heartbeat(None), Metrics(None)
    deadline.use_heartbeat(None)
