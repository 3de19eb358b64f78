"""What `/healthz` finds: 200 or 503 for many requests by one reading. (That it needs the token: tests/network.)"""

import asyncio
import json
import shutil
import threading

import pytest
from ui_helpers import watched, write_run

from ui import health


@pytest.fixture(autouse=True)
def fresh(data, monkeypatch):
    """Both folders, and no answer that is kept from another test."""
    for name in ("outputs", "datasets"):
        (data / name).mkdir()
    monkeypatch.setattr(health, "_asked", None)


def many(count: int) -> list:
    """The answers to so many requests at once."""

    async def ask():
        return await asyncio.gather(*(health.respond() for _ in range(count)))

    return asyncio.run(ask())


def test_a_run_whose_monitor_is_dead_is_a_fault_after_a_while_and_a_missing_folder_at_once(data):
    unwatched: dict[str, float] = {}
    folder = write_run(data, "lost", "running")
    (folder / "train.sh").write_text("exit\n")
    assert health.fault(unwatched, 100.0) == ""
    assert health.fault(unwatched, 100.0 + health.MONITOR_S) == health.UNWATCHED
    with watched(folder):
        assert health.fault(unwatched, 200.0) == "" and unwatched == {}
    assert health.fault(unwatched, 201.0) == "" and "lost" in unwatched  # counted anew
    for state in ("completed", "failed", "stopped", "preempted"):
        (folder / "status.json").write_text(json.dumps({"state": state}))
        assert health.fault({"lost": 0.0}, 1e6) == ""
    for text in ("", "{", "[]", '"x"', "{}"):
        (folder / "status.json").write_text(text)
        assert health.fault({}, 0.0) == "", "a damaged status"
    shutil.rmtree(data / "datasets")
    (answer,) = many(1)
    assert (answer.status_code, json.loads(answer.body)) == (503, {"status": health.UNREADABLE})


def test_many_requests_cost_one_reading_also_of_a_disk_that_does_not_respond(monkeypatch):
    calls, real = [], health.fault
    monkeypatch.setattr(health, "fault", lambda *given: calls.append(1) or real(*given))
    assert {answer.status_code for answer in many(100)} == {200} and len(calls) == 1
    monkeypatch.setattr(health, "_asked", None)
    stuck, calls = threading.Event(), []
    monkeypatch.setattr(health, "DISK_S", 0.2)
    monkeypatch.setattr(health, "fault", lambda *_: calls.append(1) or (stuck.wait(1) and ""))
    try:
        answers = many(20)
        assert {answer.status_code for answer in answers} == {503} and len(calls) == 1
        assert {json.loads(answer.body)["status"] for answer in answers} == {health.NO_ANSWER}
    finally:
        stuck.set()
