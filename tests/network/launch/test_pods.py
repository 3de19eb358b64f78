"""A rented machine stops itself; the requests are checked against what the providers document, by a server on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from provider_server import KEY, provider

from launch import pods
from launch.common import LaunchError
from launch.serve import Container

ROOT = Path(__file__).resolve().parents[3]


RUNPOD = {"RUNPOD_POD_ID": "7h9k2m4n6p", "RUNPOD_API_KEY": KEY}
VAST = {"CONTAINER_ID": "329838", "CONTAINER_API_KEY": KEY}
RUNPOD_POD, VAST_POD = pods.Pod("runpod", "7h9k2m4n6p", KEY), pods.Pod("vast", "329838", KEY)


def test_a_machine_knows_its_own_pod():
    assert pods.own_pod({}) is None
    assert pods.own_pod({"RUNPOD_POD_ID": "7h9k2m4n6p"}) is None
    assert (pods.own_pod(RUNPOD), pods.own_pod(VAST)) == (RUNPOD_POD, VAST_POD)
    for hostile in ("../pods", "a/b", "a?b", "", "x" * 65):
        assert pods.own_pod({**RUNPOD, "RUNPOD_POD_ID": hostile}) is None
        assert pods.own_pod({**VAST, "CONTAINER_ID": hostile}) is None


@pytest.mark.parametrize(
    ("pod", "answer", "sent", "said"),
    [
        (
            RUNPOD_POD,
            {"id": "7h9k2m4n6p", "status": "EXITED"},
            ("POST", "/v2/pods/7h9k2m4n6p/action", {"action": "stop"}),
            "stops",
        ),
        (VAST_POD, {"success": True}, ("PUT", "/api/v0/instances/329838/", {"state": "stopped"}), "stops"),
    ],
)
def test_a_machine_is_stopped_as_its_api_documents(monkeypatch, pod, answer, sent, said):
    with provider((200, answer)) as double:
        monkeypatch.setenv(f"HANGPROOF_{pod.provider.upper()}_URL", double.url)
        text = pods.stop(pod)
    ((*request, headers),) = double.requests
    assert tuple(request) == sent and said in text and KEY not in text + sent[1]
    assert headers["Authorization"] == f"Bearer {KEY}" and headers["Content-Type"] == "application/json"


def test_a_machine_that_is_gone_still_costs_money_and_one_that_stops_already_is_no_error(monkeypatch):
    with provider((200, {"success": False, "error": "no_such_instance", "msg": "gone"})) as double:
        monkeypatch.setenv("HANGPROOF_VAST_URL", double.url)
        with pytest.raises(LaunchError, match="still costs money: Vast.ai did not stop the instance: gone"):
            pods.stop(VAST_POD)
    with provider(
        (409, {"title": "Conflict", "status": 409, "detail": "Action not valid for current pod status"})
    ) as double:
        monkeypatch.setenv("HANGPROOF_RUNPOD_URL", double.url)
        assert "already" in pods.stop(RUNPOD_POD)


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
