"""What a button of the queue does with the runs of a sweep."""

import pytest
from sweep_helpers import make

from jobs import queue, worker


def test_cancelling_a_sweep_removes_what_is_left(base):
    made = make(base, rank=[4, 8])
    queue.add_sweep(made.name, [run for run, _ in made.runs])
    assert worker.cancel(made.name) == [] and not queue.read().entries
    with pytest.raises(queue.MonitorError, match="none of its runs waits or trains"):
        worker.cancel(made.name)
