"""What `/healthz` finds: 200 or 503 for many requests by one reading. (That it needs the token: tests/network.)"""

import asyncio
import json
import shutil
import threading

import pytest

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


def test_a_missing_folder_is_a_fault(data):
    assert [answer.status_code for answer in many(1)] == [200]
    shutil.rmtree(data / "datasets")
    (answer,) = many(1)
    assert (answer.status_code, json.loads(answer.body)) == (503, {"status": health.UNREADABLE})


def test_many_requests_cost_one_reading_also_of_a_disk_that_does_not_respond(monkeypatch):
    calls, real = [], health.fault
    monkeypatch.setattr(health, "fault", lambda: calls.append(1) or real())
    assert {answer.status_code for answer in many(100)} == {200} and len(calls) == 1
    monkeypatch.setattr(health, "_asked", None)
    stuck, calls = threading.Event(), []
    monkeypatch.setattr(health, "DISK_S", 0.2)
    monkeypatch.setattr(health, "fault", lambda: calls.append(1) or (stuck.wait(1) and ""))
    try:
        answers = many(20)
        assert {answer.status_code for answer in answers} == {503} and len(calls) == 1
        assert {json.loads(answer.body)["status"] for answer in answers} == {health.NO_ANSWER}
    finally:
        stuck.set()
