"""A rented machine stops itself; the requests are checked against what the providers document, by a server on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from provider_server import KEY, Provider, provider

from launch import pods
from launch.cloud_api import Api, ApiError
from launch.common import LaunchError
from launch.serve import Container

ROOT = Path(__file__).resolve().parents[3]


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
