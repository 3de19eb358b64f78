"""What the agent reports, without a store; tests/process has the agent's own process."""

import json
from types import SimpleNamespace

import pytest

from launch.store import agent
from launch.store.places import StoreError
from monitor import config
from monitor.store import STORE


@pytest.mark.parametrize("final", [False, True])
def test_a_copy_that_fails_is_reported_and_the_error_goes_with_the_next_one_that_succeeds(tmp_path, monkeypatch, final):
    values = lambda: json.loads((tmp_path / STORE).read_text())  # noqa: E731
    seen = []

    class Copier:
        last = None

        def __init__(self, *_):
            pass

        def push(self, progress):
            seen.append(values()["error"])
            if len(seen) == 1:
                raise StoreError("the store is full")
            one.final = True  # the end of the run
            return SimpleNamespace(notes=[], manifest=None)

    monkeypatch.setattr(agent, "Copier", Copier)
    monkeypatch.setattr(agent, "RETRY_S", 0.0)
    monkeypatch.setattr(agent, "POLL_S", 0.01)
    report, lease = agent.Report(tmp_path, "1" * 16), SimpleNamespace(state="held")
    one = agent.Agent(tmp_path, None, None, lease, report, config.load().store, adopted=True, final=final)
    one.held.set()
    one.copy()
    assert seen[:2] == ([""] if final else ["", "the store is full"])
    assert values()["error"] == ("the store is full" if final else ""), "the last copy is not repeated"
