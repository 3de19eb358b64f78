"""What the monitor takes from the agent of the store, without one."""

import io
import json
from types import SimpleNamespace

import pytest

from monitor import config, store
from monitor.run_folder import RunFolder
from monitor.state import State, Transition
from monitor.supervisor import admission


class Living:
    """A process that takes orders and carries out none."""

    pid, stdin = 1, io.BytesIO()

    def poll(self) -> None:
        return None


def test_the_last_copy_ends_at_its_limit_with_what_is_missing(tmp_path):
    (tmp_path / "run.toml").write_text(f'name = "a"\nstore = "{tmp_path}"\n')
    agent = store.StoreAgent(RunFolder(tmp_path), config.load().store)
    view = {"pid": 1, "lease": "held", "ready": True, "pending": "the LoRA", "error": "no answer", "done": 0}
    (tmp_path / store.STORE).write_text(json.dumps(view))
    agent._popen, left = Living(), iter([5.0, 1.0, 0.0])
    assert agent.flush(lambda: next(left), lambda seconds: None) == "not in the store: the LoRA (no answer)"
    assert json.loads(agent._popen.stdin.getvalue())["what"] == "flush"
    (tmp_path / store.STORE).write_text(json.dumps({**view, "done": 2}))
    assert agent.flush(lambda: 5.0, lambda seconds: None) == "", "the second order was carried out"


@pytest.mark.parametrize("lease", ["refused", "lost"])
def test_a_run_that_another_machine_trains_ends_before_its_first_attempt(lease):
    view = store.StoreView(lease=store.LeaseState(lease), message="other (process 1) trains this run")
    agent = SimpleNamespace(poll=lambda: view, unreachable_s=lambda: 0.0)
    waiting = SimpleNamespace(config=config.load())
    assert admission(waiting, agent) == Transition(State.FAILED, view.message, code=4)


def test_values_of_another_version_are_ignored():
    assert store.parse({"lease": "held", "ready": True, "new": 1}).lease is store.LeaseState.HELD
    assert store.parse({"lease": "borrowed"}) is None and store.parse({}) is None
