"""The heartbeat, the metrics and the log of this process, shared by all patches.

Loader workers are other processes. Forked or spawned, they get a heartbeat that writes nowhere: two writers would tear
one record, and a worker's progress is not the run's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from guards import crash, deadline, limits
from guards.deadline import Deadline
from guards.heartbeat import Heartbeat
from guards.metrics import Metrics, say

log = say
_heartbeat = Heartbeat(None)
_metrics = Metrics(None)
nested_phase_end_s = 0.0
"""When a nested phase (sampling, saving…) last ended, in monotonic seconds."""
run: Any = None
"""The `Run` of resume.py or musubi/resume.py: the position of this training, for whatever saves."""
end_notes: list[str] = []
"""What a run that is done reports with its outcome."""
on_batch_end: list[Callable[[], None]] = []
"""Called when everything that belongs to a batch is complete, samples and saves included. A run can be stopped here."""


def start() -> None:
    """Start the record of this training: phase "import", stacks on a signal, the outcome of an uncaught error."""
    global _heartbeat, _metrics
    _heartbeat, _metrics = Heartbeat.from_env(), Metrics.from_env()
    deadline.record_in = _heartbeat
    crash.install(_heartbeat)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_reset_in_child)
    _heartbeat.phase("import")
    _heartbeat.reach("arguments")
    deadline.watch_phases(_heartbeat)


def heartbeat() -> Heartbeat:
    """Return the heartbeat of this process. In a worker, or before `start`, it writes nowhere."""
    return _heartbeat


def metrics() -> Metrics:
    """Return the metrics of this process. Only rank 0 writes steps."""
    return _metrics if _heartbeat.rank == 0 else Metrics(None)


@contextlib.contextmanager
def phase(name: str, total: int = 0, note: str = "") -> Iterator[Heartbeat]:
    """Put the heartbeat into phase `name`, and back into the previous phase afterwards. Phases may nest."""
    global nested_phase_end_s
    beat = heartbeat()
    before = beat.current_phase
    beat.phase(name, total=total, note=note)
    yield beat
    beat.phase(before)  # not after an error: the record shows the phase in which the run failed
    nested_phase_end_s = time.monotonic()


def limit(name: str, what: str) -> Deadline:
    """Return the deadline `name` of guards/limits.py for `what`. When it expires, it ends the process."""
    return Deadline(limits.seconds(name), what)


def _reset_in_child() -> None:
    global _heartbeat, _metrics
    _heartbeat, _metrics = Heartbeat(None), Metrics(None)
    deadline.record_in = None
