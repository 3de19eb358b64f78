"""What a button of the queue does with the runs of a sweep, and what each of them gets before it starts."""

import pytest
from sweep_helpers import make

import runs
from jobs import queue


def test_cancelling_a_sweep_removes_what_is_left(base):
    made = make(base, rank=[4, 8])
    queue.add_sweep(made.name, [run for run, _ in made.runs])
    assert queue.cancel(made.name) == [] and not queue.read().entries
    with pytest.raises(queue.MonitorError, match="none of its runs waits or trains"):
        queue.cancel(made.name)


def test_a_run_of_a_sweep_starts_with_the_caches_of_those_before_it(base, monkeypatch):
    first, second = (run for run, _ in make(base, rank=[4, 8]).runs)
    (runs.datasets_dir() / first / "0_flux.npz").write_bytes(b"cache")
    started = []
    monkeypatch.setattr(queue, "launch", lambda folder: started.append((folder.name, len(list(data.glob("*.npz"))))))
    data = runs.datasets_dir() / second
    assert queue._start(runs.outputs_dir() / second) == "" and started == [(second, 1)]
