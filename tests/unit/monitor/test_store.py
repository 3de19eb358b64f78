"""What the monitor takes from the agent of the store, when it starts one, and what it orders, without a store."""

import io
import json
import os
import subprocess
from unittest.mock import Mock

import pytest
from monitor_helpers import events

from monitor import config, store
from monitor.run_folder import RunFolder

RESTART_S = config.load().store.restart_s


class Machine:
    """Starts agents, on a clock of its own."""

    def __init__(self, folder, monkeypatch):
        self.now_s, self.commands, self.error, self.folder = 1000.0, [], None, folder
        monkeypatch.setattr(store, "helper", self.helper)
        monkeypatch.setattr(store.time, "monotonic", lambda: self.now_s)
        (folder / "run.toml").write_text('name = "a"\nstore = "s3://x"\nsave_every_n_steps = 40\n')
        self.agent = store.StoreAgent(RunFolder(folder), config.load().store)

    def helper(self, command, log, stdin):
        assert log.name == str(self.folder / "monitor.log") and stdin == subprocess.PIPE
        self.commands.append(command)
        if self.error:
            raise self.error
        # It takes orders and carries out none; what `poll` returns: how it ended.
        self.process = Mock(pid=len(self.commands), stdin=io.BytesIO(), poll=Mock(return_value=None))
        return self.process

    def writes(self, **values) -> store.StoreView:
        """The view once the agent has written these values."""
        path = self.folder / store.STORE
        self.now_s += 1
        known = {"pid": self.process.pid, "lease": "held", "reachable": True, "updated_s": self.now_s}
        path.write_text(json.dumps({**known, **values}))
        os.utime(path, (0, 0))  # a USB stick counts in steps of two seconds
        return self.agent.poll()

    def pause_s(self, code: int, ran_s: float = 0.0) -> float:
        """The agent ends: the seconds until the next one is started."""
        before, self.process.poll.return_value = len(self.commands), code
        self.now_s += ran_s
        for waited_s in range(1000):
            self.agent.poll()
            if len(self.commands) > before:
                return waited_s
            self.now_s += 1
        raise AssertionError("it is not started again")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def test_an_agent_that_ends_is_started_again_after_pauses_that_grow_until_one_was_healthy(machine):
    assert machine.agent.poll() == store.StoreView()
    assert machine.commands[0][-3:] == ["store", "agent", str(machine.folder)]
    machine.agent.admitted = True
    pauses = [machine.pause_s(-9) / RESTART_S for _ in range(6)]
    assert pauses == [1, 2, 4, 8, 12, 12]
    assert machine.commands[1][-2:] == [str(machine.folder), "--adopted"], "the training runs: it goes on"
    assert machine.pause_s(1, ran_s=store.HEALTHY_S + 1) == RESTART_S
    assert machine.pause_s(1) == 2 * RESTART_S
    log = (machine.folder / "monitor.log").read_text()
    assert "was killed by SIGKILL; it is started again" in log and "ended with exit code 1; it is started again" in log


def test_an_agent_that_cannot_be_started_is_reported_once_and_tried_again(machine):
    machine.error = OSError(12, "Cannot allocate memory")
    for _ in range(3):
        machine.agent.poll()
    assert len(machine.commands) == 1
    machine.now_s += RESTART_S
    machine.agent.poll()
    assert len(machine.commands) == 2
    told = [event["message"] for event in events(machine.folder, "store_error")]
    assert told == ["the process that copies cannot be started: Cannot allocate memory"]


@pytest.mark.parametrize("lease", ["refused", "lost", "unusable"])
def test_an_agent_that_ends_because_its_run_may_not_train_is_no_fault(machine, lease):
    machine.agent.poll()
    machine.writes(lease=lease)
    machine.pause_s(1)
    assert (machine.folder / "monitor.log").read_text() == ""


def test_what_the_living_agent_writes_is_taken_and_its_news_reported_once(machine):
    agent, before = machine.agent, {"pid": 1, "lease": "held", "ready": True, "reachable": True}
    (machine.folder / store.STORE).write_text(json.dumps(before))  # in a container that starts again, IDs are the same
    for waited_s in (0, 5):  # from the first poll
        machine.now_s += waited_s
        agent.poll()
        assert agent.unreachable_s() == waited_s
    assert agent.summary()["lease"] == "connecting" and not agent.holds
    assert machine.writes(pid=77, step=5) == store.StoreView(), "an earlier agent's"
    for unknown in ("borrowed", None, []):
        assert machine.writes(lease=unknown) == store.StoreView(), "another version's"
    view = machine.writes(ready=True, step=20, pending="x", pending_bytes=3, new=1)
    assert (view.lease, view.ready, view.step) == (store.LeaseState.HELD, True, 20)
    agent.admitted = True
    assert agent.holds and agent.unreachable_s() == 0.0
    shown = {"address": "s3://x", "lease": "held", "step": 20, "holder": None, "error": None}
    assert agent.summary() == shown | {"state": view.message, "pending": "x", "pending_bytes": 3}
    for error in ("no answer", "no answer", "", "no answer"):
        machine.writes(step=40, error=error, reachable=not error)
    machine.now_s += 7
    machine.agent.poll()
    assert agent.unreachable_s() == 8, "it answered before it said that there was no answer"
    assert [(event["kind"], event["message"]) for event in events(machine.folder)] == [
        ("store", "the checkpoint of step 20 is in the store"),
        ("store_error", "no answer; the training goes on"),
        ("store", "copying to the store works again"),
        ("store_error", "no answer; the training goes on"),
    ]
    assert not (machine.writes(lease="lost"), agent.holds)[1]


def test_the_last_copy_is_ordered_of_each_agent_and_ends_at_its_limit_with_what_is_missing(machine):
    agent, limits, pauses = machine.agent, iter([9.0, 5.0, 5.0, 0.0]), []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 1:  # the agent that has the order is replaced by one that counts from 0
            machine.pause_s(-9)
        machine.writes(ready=len(pauses) > 1, pending="the LoRA", error="no answer")

    agent.poll()
    machine.writes(ready=True)
    first = machine.process
    assert agent.flush(lambda: next(limits), pause) == "not in the store: the LoRA (no answer)"
    assert pauses == [0.1] * 3
    assert first.stdin.closed
    assert json.loads(machine.process.stdin.getvalue()) == {"order": 2, "what": "flush", "limit_s": 0.0}
    machine.writes(ready=True, done=3)
    assert agent.flush(lambda: 5.0, pause) == ""
    machine.writes(lease="lost", holder="other")
    assert agent.flush(lambda: 5.0, pause) == "not in the store: other took the lease of this run"


@pytest.mark.parametrize(("program", "code"), [("cat", 0), ("sleep", -9)])
def test_an_agent_is_closed_by_the_end_of_its_orders_or_killed(tmp_path, program, code):
    (tmp_path / "run.toml").write_text('store = "s3://x"\n')
    agent = store.StoreAgent(RunFolder(tmp_path), config.load().store)
    agent.close(1.0)  # nothing runs
    with open(tmp_path / "orders", "wb") as orders:
        words = [program, "60"][: 1 + (program == "sleep")]
        process = agent._popen = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=orders, bufsize=0)
    agent.close(60.0 if program == "cat" else 0.0)
    assert process.poll() == code
    said = (tmp_path / "orders").read_text()
    assert [json.loads(line)["what"] for line in said.splitlines()] == ["release"] * (program == "cat")
    agent.poll()
    assert agent._popen is None, "it is not started again"
