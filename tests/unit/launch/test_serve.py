"""When a rented machine has nothing left to do, and what the container's log says then."""

import json
import os
import signal

import pytest

from launch import serve
from launch.common import LaunchError
from launch.serve import GRACE_S, IDLE_S, Container, Idle, endings


def runs(**states: str) -> tuple[dict[str, str], set[str]]:
    """Runs by state; those in capitals are under way."""
    return {n: s.lower() for n, s in states.items()}, {n for n, s in states.items() if s.isupper()}


TRAINS = (0.0, runs(a="RUNNING"))
DONE, STOPPED = runs(a="completed"), runs(a="stopped")
NEXT_STARTS = runs(a="completed", b="STARTING")


@pytest.mark.parametrize(
    ("rule", "moments", "stops"),
    [
        *[  # a minute after its last run has ended
            ("1", (TRAINS, (10.0, runs(a=end)), (9.0 + GRACE_S, runs(a=end)), (11.0 + GRACE_S, runs(a=end))), True)
            for end in ("completed", "failed", "preempted", "unkillable")
        ],
        ("", (TRAINS, (10.0, DONE), (1e6, DONE)), False),
        ("1", ((0.0, runs(a="RUNNING", b="completed")), (1e6, runs(a="RUNNING", b="completed"))), False),
        ("1", (TRAINS, (10.0, runs(a="running")), (1e6, runs(a="running"))), False),  # its monitor is being replaced
        ("1", (TRAINS, (10.0, DONE), (60.0, NEXT_STARTS), (120.0, runs(a="completed", b="failed"))), False),
        ("1", (TRAINS, (10.0, STOPPED), (1e6, STOPPED)), False),  # the user stopped it
        ("always", (TRAINS, (10.0, STOPPED), (1e6, STOPPED)), True),
        ("1", ((0.0, DONE), (IDLE_S - 1, DONE), (IDLE_S + 1, DONE)), True),  # started for a finished run
    ],
)
def test_when_a_pod_stops(rule, moments, stops):
    idle = Idle(rule)
    *before, last = [bool(idle.reason(*now, at_s, False)) for at_s, now in moments]
    assert not any(before) and last == stops


def test_a_pod_waits_for_its_run_and_stops_a_minute_after_it_could_not_be_started():
    idle = Idle("1", failed="cat cannot start")
    assert not idle.reason(*runs(), 0.0, True) and not idle.reason(*runs(), -1e6, True)
    assert not idle.reason(*runs(), 0.0, False)
    assert "cat cannot start" in idle.reason(*runs(), GRACE_S + 1, False)


def test_a_wrong_variable_is_reported():
    for rule, kept in (("", ""), ("0", ""), ("1", "1"), ("always", "always")):
        assert Container(1, {"HANGPROOF_STOP_POD": rule}).idle.rule == kept
    for wrong in ({"HANGPROOF_STOP_POD": "yes"}, {"HANGPROOF_STOP_AFTER_S": "soon"}, {"HANGPROOF_STOP_AFTER_S": "-1"}):
        with pytest.raises(LaunchError, match=next(iter(wrong))):
            Container(1, wrong)


def test_the_container_log_says_how_the_runs_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    folder = tmp_path / "outputs" / "cat"
    folder.mkdir(parents=True)
    status = {"state": "preempted", "reason": "this machine has none", "store": {"pending": "a checkpoint"}}
    (folder / "status.json").write_text(json.dumps(status))
    first, second = endings({"cat"})
    assert first == "cat: preempted: this machine has none"
    assert second == "cat: not in the store: a checkpoint. It is kept on this machine's disk"


def test_a_signal_ends_the_loop_of_the_container(data, monkeypatch):
    rounds = []

    def keep_page(container):
        rounds.append(container)
        assert len(rounds) == 1, "the loop went on after SIGTERM"
        os.kill(os.getpid(), signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(serve, "POLL_S", 0.0)
    monkeypatch.setattr(serve.subprocess, "run", lambda *words, **more: None)
    monkeypatch.setattr(serve.Container, "_keep_page", keep_page)
    monkeypatch.setattr(serve.Container, "leave", lambda container: container.signals[0])
    try:
        assert serve.Container(1, {}).serve() == signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
