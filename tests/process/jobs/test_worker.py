"""What starts the runs of the queue: each once, whatever is killed, and at once where no GPU is needed."""

import pytest
from monitor_helpers import wait_for
from queue_helpers import command, ended, made, starts
from run_facts import step_of

from jobs import queue, worker
from monitor.process.platform import LOCK, Lock


@pytest.mark.slow
def test_what_was_started_before_a_kill_is_not_started_again(data):
    (run,) = made(data, "run")
    queue.add(run)
    assert worker._take() == "run"
    assert worker._start(run) == ""
    wait_for(lambda: ended(run), what="the run")
    (run / "run.safetensors").unlink()  # so that a second start would train again
    command("queue", "work")  # the process that took it was killed here
    assert not queue.read().entries and len(starts(run)) == 1
    # Taken, and killed before the start: it is started now.
    (other,) = made(data, "other")
    queue.add(other)
    assert worker._take() == "other"
    command("queue", "work")
    wait_for(lambda: ended(other), what="the other run")
    assert len(starts(other)) == 1


def test_a_look_at_a_busy_gpu_keeps_the_note_of_what_is_being_started(data):
    run, other = made(data, "run", "other")
    queue.add(run)
    assert worker._take() == "run"  # the process that took it was killed here, before the monitor had its lock
    lock = Lock(other / LOCK)
    assert lock.acquire()
    assert worker._take() == "" and queue.read().taken == "run"
    (run / "status.json").write_text("{}")  # the monitor's first act
    lock.release()
    assert worker._take() == "" and queue.read() == queue.Queue()


@pytest.mark.slow
def test_a_run_without_a_gpu_starts_at_once_and_one_with_a_gpu_waits(data, monkeypatch):
    busy, other = made(data, "busy", "other", steps=5000)
    worker.start_or_wait(busy)
    wait_for(lambda: step_of(busy) >= 1, what="a step")
    assert worker.start_or_wait(other)["position"] == 1
    assert worker.start_or_wait(other)["position"] == 1  # asked twice
    queue.cancel("other")
    monkeypatch.setenv("HANGPROOF_GPUS", "")
    assert worker.start_or_wait(other)["pid"]
    for name in ("busy", "other"):
        assert command("stop", name, "--wait", "60").returncode == 0
