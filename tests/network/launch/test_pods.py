"""A rented machine stops itself; the requests are checked against what the providers document, by a server on loopback."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launch import pods
from launch.cloud_api import Api, ApiError
from launch.common import LaunchError
from launch.serve import GRACE_S, IDLE_S, Container, Idle, Observed, endings

ROOT = Path(__file__).resolve().parents[3]
KEY = "rpa_0123456789SECRET"


@dataclass
class Provider:
    """A double of an HTTP API: it answers with `answers` in turn (the last one again and again) and records the requests."""

    url: str
    answers: list[tuple[int, object, dict[str, str]]]
    requests: list[tuple[str, str, object, dict[str, str]]] = field(default_factory=list)


@contextlib.contextmanager
def provider(*answers: tuple[int, object] | tuple[int, object, dict[str, str]]) -> Iterator[Provider]:
    """A running Provider."""
    full = [(*answer, {})[:3] for answer in answers]

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            double.requests.append((self.command, self.path, body, dict(self.headers)))
            status, value, headers = full.pop(0) if len(full) > 1 else full[0]
            if status == 0:  # no answer at all
                self.connection.close()
                return
            data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = answer

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    double = Provider(f"http://127.0.0.1:{server.server_port}", full)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def api(double: Provider, **more) -> Api:
    return Api("RunPod", double.url, KEY, pause_s=0.01, **more)


RUNPOD = {"RUNPOD_POD_ID": "7h9k2m4n6p", "RUNPOD_API_KEY": KEY}
VAST = {"CONTAINER_ID": "329838", "CONTAINER_API_KEY": KEY}


def test_a_machine_knows_its_own_pod():
    assert pods.own_pod({}) is None
    assert pods.own_pod({"RUNPOD_POD_ID": "7h9k2m4n6p"}) is None
    assert pods.own_pod(RUNPOD) == pods.Pod("runpod", "7h9k2m4n6p", KEY)
    assert pods.own_pod(VAST) == pods.Pod("vast", "329838", KEY)
    for hostile in ("../pods", "a/b", "a?b", "", "x" * 65):
        assert pods.own_pod({**RUNPOD, "RUNPOD_POD_ID": hostile}) is None
        assert pods.own_pod({**VAST, "CONTAINER_ID": hostile}) is None


def test_runpod_is_stopped_as_its_api_documents(monkeypatch):
    with provider((200, {"id": "7h9k2m4n6p", "status": "EXITED"})) as double:
        monkeypatch.setenv("HANGPROOF_RUNPOD_URL", double.url)
        said = pods.stop(pods.Pod("runpod", "7h9k2m4n6p", KEY))
    ((method, path, body, headers),) = double.requests
    assert (method, path, body) == ("POST", "/v2/pods/7h9k2m4n6p/action", {"action": "stop"})
    assert headers["Authorization"] == f"Bearer {KEY}" and headers["Content-Type"] == "application/json"
    assert "stops" in said and KEY not in said + path


def test_vast_is_stopped_as_its_api_documents(monkeypatch):
    with provider((200, {"success": True})) as double:
        monkeypatch.setenv("HANGPROOF_VAST_URL", double.url)
        pods.stop(pods.Pod("vast", "329838", KEY))
    ((method, path, body, headers),) = double.requests
    assert (method, path, body) == ("PUT", "/api/v0/instances/329838/", {"state": "stopped"})
    assert headers["Authorization"] == f"Bearer {KEY}"
    with provider((200, {"success": False, "error": "no_such_instance", "msg": "gone"})) as double:
        monkeypatch.setenv("HANGPROOF_VAST_URL", double.url)
        with pytest.raises(LaunchError, match="still costs money: Vast.ai did not stop the instance: gone"):
            pods.stop(pods.Pod("vast", "329838", KEY))


def test_a_pod_that_is_stopping_already_is_no_error(monkeypatch):
    problem = {"title": "Conflict", "status": 409, "detail": "Action not valid for current pod status"}
    with provider((409, problem)) as double:
        monkeypatch.setenv("HANGPROOF_RUNPOD_URL", double.url)
        assert "already" in pods.stop(pods.Pod("runpod", "p", KEY))


def test_passing_faults_are_tried_again_and_final_ones_are_not():
    busy = {"title": "Too Many Requests", "status": 429, "detail": "rate limit exceeded for the minute window"}
    with provider((429, busy, {"Retry-After": "0"}), (503, "down"), (0, ""), (200, {"id": "p"})) as double:
        assert api(double).call("POST", "/v2/pods/p/action", {"action": "stop"}) == {"id": "p"}
        assert len(double.requests) == 4
    for status in (400, 401, 402, 403, 404, 422):
        with provider((status, {"title": "No", "status": status, "detail": "because"})) as double:
            with pytest.raises(ApiError, match="because") as caught:
                api(double).call("POST", "/v2/pods", {})
            assert caught.value.status == status and len(double.requests) == 1


def test_a_provider_that_never_answers_is_given_up():
    with provider((503, "down")) as double, pytest.raises(ApiError, match="HTTP 503"):
        api(double, patience_s=0.3).call("GET", "/v2/pods")
    assert 2 <= len(double.requests) < 40


def test_the_key_goes_only_where_it_belongs():
    with provider((200, {})) as thief, provider((307, "", {"Location": f"{thief.url}/steal"})) as double:
        with pytest.raises(ApiError, match="HTTP 307"):
            api(double).call("GET", "/v2/pods")
        assert thief.requests == []
    with pytest.raises(ApiError, match="https only"):
        Api("RunPod", "http://api.runpod.io", KEY).call("GET", "/v2/pods")
    with provider((400, {"detail": f"bad key {KEY}"})) as double, pytest.raises(ApiError) as caught:
        api(double).call("GET", "/v2/pods")
    assert KEY not in str(caught.value)


def test_an_answer_that_is_no_json_is_reported():
    with provider((200, "<html>captive portal</html>")) as double, pytest.raises(ApiError, match="not JSON"):
        api(double).call("GET", "/v2/pods")


def test_stop_pod_as_a_command():
    env = {k: v for k, v in os.environ.items() if k not in {**RUNPOD, **VAST}}
    command = [sys.executable, "-m", "launch", "stop-pod", "--json"]
    with provider((200, {"id": "p"})) as double:
        env["HANGPROOF_RUNPOD_URL"] = double.url
        done = subprocess.run(command, cwd=ROOT, env=env | RUNPOD, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == {"provider": "runpod", "id": "7h9k2m4n6p", "stopped": True}
        assert KEY not in done.stdout + done.stderr
        elsewhere = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert elsewhere.returncode == 1 and "no pod" in elsewhere.stderr


def runs(**states: str) -> Observed:
    """Runs by state; those in capitals are under way."""
    return Observed({n: s.lower() for n, s in states.items()}, frozenset(n for n, s in states.items() if s.isupper()))


def decided(rule: str, *moments: tuple[float, Observed], waiting: bool = False) -> list[bool]:
    idle = Idle(rule)
    return [bool(idle.reason(now, at_s, waiting)) for at_s, now in moments]


def test_a_pod_stops_a_minute_after_its_last_run_has_ended():
    for end in ("completed", "failed", "preempted", "unkillable"):
        moments = (
            (0.0, runs(a="RUNNING")),
            (10.0, runs(a=end)),
            (9.0 + GRACE_S, runs(a=end)),
            (11.0 + GRACE_S, runs(a=end)),
        )
        assert decided("1", *moments) == [False, False, False, True], end
    assert decided("", (0.0, runs(a="RUNNING")), (10.0, runs(a="completed")), (1e6, runs(a="completed"))) == [False] * 3


def test_a_pod_does_not_stop_while_a_run_trains_or_may_go_on():
    assert decided("1", (0.0, runs(a="RUNNING", b="completed")), (1e6, runs(a="RUNNING", b="completed"))) == [False] * 2
    # its monitor was killed and is being replaced
    assert decided("1", (0.0, runs(a="RUNNING")), (10.0, runs(a="running")), (1e6, runs(a="running"))) == [False] * 3
    assert decided("1", (0.0, runs()), (1e6, runs()), waiting=True) == [False] * 2
    # another one was started within the grace
    moments = ((0.0, runs(a="RUNNING")), (10.0, runs(a="completed")), (60.0, runs(a="completed", b="STARTING")))
    assert (
        decided("1", *moments, (100.0, runs(a="completed", b="failed")), (120.0, runs(a="completed", b="failed")))
        == [False] * 5
    )


def test_a_run_that_the_user_stopped_stops_the_pod_only_when_asked():
    moments = ((0.0, runs(a="RUNNING")), (10.0, runs(a="stopped")), (1e6, runs(a="stopped")))
    assert decided("1", *moments) == [False] * 3
    assert decided("always", *moments) == [False, False, True]


def test_a_pod_that_was_started_for_a_finished_run_stops_after_half_an_hour():
    moments = ((0.0, runs(a="completed")), (IDLE_S - 1, runs(a="completed")), (IDLE_S + 1, runs(a="completed")))
    assert decided("1", *moments) == [False, False, True]


def test_a_pod_whose_run_cannot_be_started_stops_after_a_minute():
    idle = Idle("1", failed="cat cannot start")
    assert not idle.reason(runs(), 0.0, False)
    assert "cat cannot start" in idle.reason(runs(), GRACE_S + 1, False)


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
    status = {
        "state": "preempted",
        "reason": "this machine has none",
        "store": {"pending": "the checkpoint of step 40"},
    }
    (folder / "status.json").write_text(json.dumps(status))
    first, second = endings({"cat"})
    assert first == "cat: preempted: this machine has none"
    assert second == "cat: not in the store: the checkpoint of step 40. It is kept on this machine's disk"


def test_a_provider_that_refuses_to_stop_the_pod_is_asked_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    denied = {"title": "Forbidden", "status": 403, "detail": "access denied"}
    with provider((403, denied), (200, {"id": "p"})) as double:
        monkeypatch.setenv("HANGPROOF_RUNPOD_URL", double.url)
        container = Container(1, {**RUNPOD, "HANGPROOF_STOP_POD": "1", "HANGPROOF_STOP_AFTER_S": "0"})
        container.idle.failed = "cat cannot start"
        container._stop_when_idle()
        assert "still costs money" in capsys.readouterr().err and len(double.requests) == 1
        container._stop_when_idle()
        assert len(double.requests) == 1, "not before five minutes have passed"
        container.stop_at_s = 0.0
        container._stop_when_idle()
        said = capsys.readouterr().err
        assert len(double.requests) == 2 and "cat cannot start" in said and KEY not in said
