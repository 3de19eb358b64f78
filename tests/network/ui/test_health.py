"""`/healthz`: 200 or 503 with the token, and nothing about the data."""

import asyncio
import json
import shutil
import threading

import pytest
from ui_helpers import serving, write_run

from monitor.process.locks import LOCK, Lock
from tests.network.ui.test_security import ask
from ui import health


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data root with both folders."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    for name in ("outputs", "datasets"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def fresh(monkeypatch):
    """No answer is kept from another test."""
    monkeypatch.setattr(health, "_latest", health._Latest())


def test_it_answers_to_the_token_and_tells_nothing(tmp_path):
    with serving(tmp_path / "data", "--listen", "--auth", "me:a-long-secret") as server:
        write_run(server.data, "secret name", "completed")
        assert ask(server, "GET", "/healthz")[0] == 401
        server.sends_token = True  # beside the login, as the container's health check
        status, headers, body = ask(server, "GET", "/healthz")
        assert (status, json.loads(body)) == (200, {"status": "ok"}) and headers["cache-control"] == "no-store"
        assert ask(server, "HEAD", "/healthz")[0] == 200
        assert ask(server, "POST", "/healthz")[0] == 405
        assert ask(server, "GET", "/healthz", Host="evil.example")[0] == 403
        shutil.rmtree(server.data / "outputs")
        for _ in range(200):
            status, _, body = ask(server, "GET", "/healthz")
            if status == 503:
                break
            threading.Event().wait(0.1)
        assert (status, json.loads(body)) == (503, {"status": health.UNREADABLE})


def test_a_run_whose_monitor_is_dead_is_a_fault_after_a_while(root):
    unwatched: dict[str, float] = {}
    folder = write_run(root, "lost", "running")
    (folder / "train.sh").write_text("exit\n")
    assert health.fault(unwatched, 100.0) == ""
    assert health.fault(unwatched, 100.0 + health.MONITOR_S) == health.UNWATCHED
    lock = Lock(folder / LOCK)
    assert lock.acquire()
    try:
        assert health.fault(unwatched, 200.0) == "" and unwatched == {}
    finally:
        lock.release()
    assert health.fault(unwatched, 201.0) == "" and "lost" in unwatched  # counted anew


@pytest.mark.parametrize("state", ["completed", "failed", "stopped", "preempted"])
def test_a_run_that_ended_is_no_fault(root, state):
    folder = write_run(root, "done", state)
    (folder / "train.sh").write_text("exit\n")
    assert health.fault({"done": 0.0}, 1e6) == ""


def test_a_damaged_status_file_is_no_fault_and_a_missing_folder_is(root):
    folder = write_run(root, "odd", "running")
    (folder / "train.sh").write_text("exit\n")
    for text in ("", "{", "[]", '"x"', "{}"):
        (folder / "status.json").write_text(text)
        assert health.fault({}, 0.0) == ""
    shutil.rmtree(root / "datasets")
    assert health.fault({}, 0.0) == health.UNREADABLE


def test_a_disk_that_does_not_respond_costs_one_thread(root, fresh, monkeypatch):
    stuck, calls = threading.Event(), []
    monkeypatch.setattr(health, "DISK_S", 0.2)
    monkeypatch.setattr(health, "fault", lambda *_: calls.append(1) or (stuck.wait(60) and ""))

    async def many():
        return await asyncio.gather(*(health.respond() for _ in range(20)))

    try:
        answers = asyncio.run(many())
        assert {answer.status_code for answer in answers} == {503} and len(calls) == 1
        assert {json.loads(answer.body)["status"] for answer in answers} == {health.NO_ANSWER}
    finally:
        stuck.set()


def test_many_requests_cost_one_reading(root, fresh, monkeypatch):
    calls = []
    real = health.fault
    monkeypatch.setattr(health, "fault", lambda *given: calls.append(1) or real(*given))

    async def many():
        return await asyncio.gather(*(health.respond() for _ in range(100)))

    assert {answer.status_code for answer in asyncio.run(many())} == {200} and len(calls) == 1
