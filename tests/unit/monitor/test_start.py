"""How an attempt is started, without a run."""

from types import SimpleNamespace
from unittest.mock import Mock

from monitor import config, start
from monitor.state import State


def test_a_start_that_the_system_refuses_is_tried_for_ten_minutes_with_growing_waits(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(start.time, "monotonic", lambda: clock[0])
    run = SimpleNamespace(tries=0, folder=Mock())
    waits, limit_s = [], config.load(environ={}).restart.start_s
    while (wait := start._try_again(run, "no descriptor", limit_s)).state is State.BACKOFF:
        waits.append(wait.due_s - clock[0])
        clock[0] = wait.due_s
    assert waits == sorted(waits) and waits[0] <= 2 and waits[-1] >= 30 and clock[0] >= 600
    assert wait.state is State.FAILED and wait.message.startswith("no descriptor (tried ")
