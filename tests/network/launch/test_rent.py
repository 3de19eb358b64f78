"""RunPod: exactly one pod is rented for a run, whatever becomes of the answer, and it stops itself (a double)."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest
from launch_helpers import a_run, a_spec, arguments
from loopback import Double, answering, in_turn
from runs_helpers import python

from launch import rent, travel
from launch.common import LaunchError
from launch.serve import Container

KEY, NAME = "rpa_0123456789SECRET", "hangproof-my-lora-1234"
BEFORE, OWN = {"id": "100", "name": "hangproof-my-lora-9999"}, {"id": "101", "name": NAME}


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([(201, OWN)], ""),
        ([(502, "<html>bad gateway</html>"), (200, [BEFORE, OWN])], ""),
        ([None, (200, [BEFORE]), (200, {"items": [BEFORE]}), (200, {"items": ["x", OWN]})], ""),
        ([(202, {"status": "accepted"}), (200, [OWN])], ""),
        ([(200, {"id": {}}), (200, "[" * 9999), (200, [OWN])], ""),
        ([(502, ""), (401, {"detail": "no"})], "cannot be read"),
        ([(503, {"detail": "busy"}), (200, [BEFORE])], "HTTP 503"),
    ],
)
def test_one_pod_is_rented_when_its_creation_is_not_confirmed(answers, text, clean, monkeypatch):
    monkeypatch.setattr(rent, "LOOK_S", 0.01)
    monkeypatch.setattr(rent, "token_hex", lambda count: "1234")
    with in_turn(*answers) as double:
        monkeypatch.setenv("HANGPROOF_RUNPOD_URL", double.url)
        rented = partial(rent.create, KEY, a_spec(), arguments(rent, "--image", "me/h:1"), ["L4"])
        if text:
            with pytest.raises(LaunchError, match=f"{text}.*Look for the pod {NAME} .*console.*costs money"):
                rented()
        else:
            assert rented()["id"] == "101", "that of the same run before is another one"
    created = [body["name"] for method, _, body, _ in double.requests if method == "POST"]
    assert created == [NAME], "no second one is made"


GPUS = ["NVIDIA RTX 2000 Ada Generation", "NVIDIA RTX A4000", "NVIDIA L4"]
POD = {"id": "7h9k2m4n6p", "status": "PROVISIONING", "cost": 0.44}
# CreatePodRequest of RunPod's OpenAPI document, version 2.0.0
SCHEMA = dict.fromkeys(("name", "image", "cloud"), str) | dict.fromkeys(("gpu", "mounts", "env"), dict)
SCHEMA |= {"disk": int, "ports": list, "dataCenterIds": list}


@pytest.fixture
def remote(clean, quick, tmp_path, monkeypatch):
    """A run whose store is a folder, in place of one that the provider reaches; a lease is taken at once."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "data"))
    folder = a_run(tmp_path / "data", tier="12G", store=str(tmp_path / "store"))
    monkeypatch.setattr(travel, "address", lambda made: str(tmp_path / "store"))
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    return folder


def submitted(folder, double: Double, monkeypatch, *words: str) -> int:
    monkeypatch.setenv("HANGPROOF_RUNPOD_URL", double.url)
    words = ("--image", "docker.io/me/hangproof:1", "--gpu", ",".join(GPUS), *words, "--submit")
    return rent.run(arguments(rent, *words, run=folder.name, json=True))


def test_a_pod_is_created_as_runpod_documents(remote, monkeypatch, capsys):
    with in_turn((201, POD)) as double:
        assert submitted(remote, double, monkeypatch) == 0
    ((method, path, body, headers),) = double.requests
    assert (method, path, headers["Authorization"]) == ("POST", "/v2/pods", f"Bearer {KEY}")
    assert all(isinstance(body[key], SCHEMA[key]) for key in body) and {"name", "image"} <= set(body), body
    assert all(isinstance(word, str) for item in body["env"].items() for word in item) and len(body["env"]) <= 50
    assert body["gpu"] == {"id": "NVIDIA RTX 2000 Ada Generation", "count": 1, "minCudaVersion": "13.0"}
    assert body["cloud"] == "SECURE" and body["mounts"] == {"persistent": {"size": 200, "path": "/workspace"}}
    assert body["env"]["HF_TOKEN"] == "{{ RUNPOD_SECRET_HF_TOKEN }}"
    assert body["env"]["HANGPROOF_AUTH"] == "{{ RUNPOD_SECRET_HANGPROOF_AUTH }}"
    assert body["env"]["HANGPROOF_STOP_POD"] == "1" and body["env"]["HANGPROOF_NEEDS_GPU"] == "1"
    assert body["env"]["HANGPROOF_DATA"].startswith("/workspace/") and body["env"]["HF_HOME"].startswith("/workspace/")
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["pod"] == "7h9k2m4n6p" and KEY not in out
    assert "costs 0.44 USD an hour; it stops itself" in out
    assert "secrets in RunPod's console first: HANGPROOF_AUTH" in out
    written = (remote / "runpod.json").read_text()
    assert json.loads(written) == {**body, "name": f"hangproof-{remote.name.lower()}"} and KEY not in written


def test_a_pod_is_tried_on_the_next_gpu_when_runpod_has_none(remote, monkeypatch):
    none = {"title": "Bad Request", "status": 400, "detail": "There are no instances currently available"}
    with in_turn((400, none), (403, none), (201, POD)) as double:
        assert submitted(remote, double, monkeypatch, "--volume", "vol_x", "--data-center", "EU-RO-1") == 0
    asked = [body["gpu"]["id"] for _, _, body, _ in double.requests]
    assert asked == GPUS
    assert double.requests[0][2]["mounts"] == {"network": [{"volumeId": "vol_x", "path": "/workspace"}]}
    with in_turn((400, none)) as double, pytest.raises(LaunchError, match="none of these GPUs now.*no instances"):
        submitted(remote, double, monkeypatch)
    assert len(double.requests) == len(GPUS)


@pytest.mark.parametrize("status, text", [(401, "not accept the key"), (402, "balance"), (422, "refused")])
def test_runpods_final_refusals_are_not_repeated(remote, monkeypatch, status, text):
    with in_turn((status, {"title": "x", "status": status, "detail": "d", "errors": ["$: bogus"]})) as double:
        with pytest.raises(LaunchError, match=text) as caught:
            submitted(remote, double, monkeypatch)
    assert len(double.requests) == 1 and "bogus" in str(caught.value) and KEY not in str(caught.value)


def test_a_pod_needs_a_key_and_a_store_that_takes_one(remote, monkeypatch):
    with pytest.raises(LaunchError, match="no SSH key for its store"):
        rent.body(a_spec(store="sftp://nas/runs"), None, "")
    with in_turn((201, POD)) as double:
        for wrong, text in ((" ", "RUNPOD_API_KEY is not set"), ("a b", "unusual characters")):
            monkeypatch.setenv("RUNPOD_API_KEY", wrong)
            with pytest.raises(LaunchError, match=text):
                submitted(remote, double, monkeypatch)
        assert double.requests == []


def test_the_key_goes_only_where_it_belongs(monkeypatch):
    def asked(url: str, text: str, kind: type = rent.ApiError) -> None:
        monkeypatch.setenv("HANGPROOF_RUNPOD_URL", url)
        with pytest.raises(LaunchError, match=text) as caught:
            rent.call(KEY, "GET", "/v2/pods")
        assert KEY not in str(caught.value) and type(caught.value) is kind

    with in_turn((200, {})) as thief, in_turn((307, "", {"Location": f"{thief.url}/steal"})) as double:
        asked(double.url, "HTTP 307")
        assert thief.requests == []
    asked("http://api.runpod.io", "https only; fix the address", LaunchError)
    monkeypatch.setenv("HTTPS_PROXY", "ftp://127.0.0.1")
    asked("https://api.runpod.io", "Unknown scheme.*or the proxy", LaunchError)
    monkeypatch.setattr(rent, "TIMEOUT_S", 0.2)
    with answering(lambda request: (200, (time.sleep(0.05) or b" " for _ in range(200)))) as double:
        asked(double.url, "does not answer .*0.4 s for the answer")
    for answer, text in (((400, {"detail": f"bad key {KEY}"}), "bad key"), ((200, "<html>captive"), "not JSON")):
        with in_turn(answer) as double:
            asked(double.url, text)


RUNPOD = {"RUNPOD_POD_ID": "7h9k2m4n6p", "RUNPOD_API_KEY": KEY}
OWN_POD = ("7h9k2m4n6p", KEY)


def test_a_machine_knows_its_own_pod():
    assert rent.own_pod({"RUNPOD_POD_ID": "7h9k2m4n6p"}) is None and rent.own_pod(RUNPOD) == OWN_POD
    for hostile in ("../pods", "a/b", "a?b", "", "x" * 65):
        assert rent.own_pod({**RUNPOD, "RUNPOD_POD_ID": hostile}) is None


def test_a_pod_that_cannot_be_stopped_still_costs_money_and_one_that_stops_already_is_no_error(monkeypatch):
    for answer, text in (((404, {"detail": "gone"}), "still costs money: .*gone"), ((409, {"detail": "stopping"}), "")):
        with in_turn(answer) as double:
            monkeypatch.setenv("HANGPROOF_RUNPOD_URL", double.url)
            if text:
                with pytest.raises(LaunchError, match=text):
                    rent.stop(*OWN_POD)
            else:
                assert "already" in rent.stop(*OWN_POD)


def test_a_pod_is_stopped_as_the_api_documents():
    command = ("-m", "launch", "stop-pod", "--json")
    with in_turn((200, {"id": "p"})) as double:
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
    with in_turn((403, denied), (200, {"id": "p"})) as double:
        monkeypatch.setenv("HANGPROOF_RUNPOD_URL", double.url)
        container = Container(1, {**RUNPOD, "HANGPROOF_STOP_POD": "1", "HANGPROOF_STOP_AFTER_S": "0"})
        container.idle.failed = "cat cannot start"
        container._look()
        assert "still costs money" in capsys.readouterr().err and len(double.requests) == 1
        container._look()
        assert len(double.requests) == 1, "not before five minutes have passed"
        container.stop_at_s = 0.0
        container._look()
        said = capsys.readouterr().err
        assert len(double.requests) == 2 and "cat cannot start" in said and KEY not in said
