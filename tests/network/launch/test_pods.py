"""A pod stops itself; the request is checked against what RunPod documents, by a server on loopback."""

from __future__ import annotations

import json

import pytest
from provider_server import KEY, provider
from runs_helpers import python

from launch import rent
from launch.common import LaunchError
from launch.serve import Container

RUNPOD = {"RUNPOD_POD_ID": "7h9k2m4n6p", "RUNPOD_API_KEY": KEY}
POD = ("7h9k2m4n6p", KEY)


def test_a_machine_knows_its_own_pod():
    assert rent.own_pod({}) is None
    assert rent.own_pod({"RUNPOD_POD_ID": "7h9k2m4n6p"}) is None
    assert rent.own_pod(RUNPOD) == POD
    for hostile in ("../pods", "a/b", "a?b", "", "x" * 65):
        assert rent.own_pod({**RUNPOD, "RUNPOD_POD_ID": hostile}) is None


def test_a_pod_that_cannot_be_stopped_still_costs_money_and_one_that_stops_already_is_no_error(monkeypatch):
    for answer, text in (((404, {"detail": "gone"}), "still costs money: .*gone"), ((409, {"detail": "stopping"}), "")):
        with provider(answer) as double:
            monkeypatch.setenv("HANGPROOF_RUNPOD_URL", double.url)
            if text:
                with pytest.raises(LaunchError, match=text):
                    rent.stop(*POD)
            else:
                assert "already" in rent.stop(*POD)


def test_a_pod_is_stopped_as_the_api_documents():
    command = ("-m", "launch", "stop-pod", "--json")
    with provider((200, {"id": "p"})) as double:
        done = python(*command, HANGPROOF_RUNPOD_URL=double.url, **RUNPOD)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == {"id": "7h9k2m4n6p", "stopped": True}
        ((*request, headers),) = double.requests
        assert request == ["POST", "/v2/pods/7h9k2m4n6p/action", {"action": "stop"}]
        assert KEY not in done.stdout + done.stderr + request[1]
        assert headers["Authorization"] == f"Bearer {KEY}" and headers["Content-Type"] == "application/json"
        elsewhere = python(*command, HANGPROOF_RUNPOD_URL=double.url)
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
