"""RunPod: exactly one pod is rented for a run, whatever becomes of the answer. RunPod is a double on loopback."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launch_helpers import a_run, a_spec, arguments
from loopback import Request, answering
from provider_server import KEY, Provider, provider

from launch import rent, travel
from launch.common import LaunchError
from launch.rent import ApiError


@dataclass
class Cloud:
    """Creates a machine for a request, answers as `fault` says, and lists what it created."""

    fault: str = ""  # "502", "503 refused" (nothing created), "drop"
    listing: str = "ok"  # or "broken"
    late: int = 0  # the list shows a machine only after so many looks
    machines: list[dict] = field(default_factory=list)
    creations: int = 0
    looks: int = 0

    def answer(self, request: Request) -> tuple[int, object] | None:
        if request.method == "GET":
            self.looks += 1
            if self.listing == "broken":
                return 401, {"detail": "no"}
            return 200, self.machines if self.looks > self.late else []
        self.creations += 1
        if self.fault == "503 refused":
            return 503, {"detail": "busy"}
        made = {"id": str(100 + len(self.machines)), "name": request.json.get("name")}
        self.machines.append(made)
        if self.fault == "drop":
            return None
        return (502, "<html>bad gateway</html>") if self.fault else (201, made)


@pytest.fixture
def rented(clean, monkeypatch):
    """Rents a machine of a Cloud; its number."""
    monkeypatch.setattr(rent, "LOOK_S", 0.01)

    def rented(cloud: Cloud) -> str:
        with answering(cloud.answer) as server:
            monkeypatch.setenv("HANGPROOF_RUNPOD_URL", server.url)
            return str(rent.create(KEY, a_spec(), arguments(rent, "--image", "me/h:1"), ["L4"])["id"])

    return rented


@pytest.mark.parametrize("fault", ["502", "drop"])
@pytest.mark.parametrize("late", [0, 2])
def test_one_machine_is_rented_when_its_creation_is_not_confirmed(fault, late, rented):
    cloud = Cloud()
    before = rented(cloud)
    cloud.fault, cloud.late = fault, late
    assert rented(cloud) == "101" != before, "it is found, and that of the same run before is another one"
    assert len(cloud.machines) == cloud.creations == 2, "no second one is made"


@pytest.mark.parametrize(
    ("fault", "listing", "text"), [("502", "broken", "cannot be read"), ("503 refused", "ok", "HTTP 503")]
)
def test_an_unknown_machine_is_named_and_none_is_made_again(fault, listing, text, rented):
    cloud = Cloud(fault, listing)
    with pytest.raises(LaunchError, match=f"{text}.*Look for the pod hangproof-.*console.*costs money"):
        rented(cloud)
    assert cloud.creations == 1


GPUS = ["NVIDIA RTX 2000 Ada Generation", "NVIDIA RTX A4000", "NVIDIA L4"]
POD = {"id": "7h9k2m4n6p", "status": "PROVISIONING", "cost": 0.44}
# CreatePodRequest of RunPod's OpenAPI document, version 2.0.0
SCHEMA = dict.fromkeys(("name", "image", "cloud"), str) | dict.fromkeys(("gpu", "mounts", "env"), dict)
SCHEMA |= {"disk": int, "ports": list, "dataCenterIds": list}


def assert_documented(request: dict) -> None:
    """The body has the shape that RunPod documents."""
    assert all(isinstance(request[key], SCHEMA[key]) for key in request), request
    assert {"name", "image", "gpu"} <= set(request) and set(request["gpu"]) == {"id", "count", "minCudaVersion"}
    assert request["cloud"] == "SECURE" and len(request["mounts"]) == 1
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in request["env"].items())
    assert len(request["env"]) <= 50


@pytest.fixture
def remote(clean, quick, tmp_path, monkeypatch):
    """A run whose store is a folder, in place of one that the provider reaches; a lease is taken at once."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "data"))
    folder = a_run(tmp_path / "data", tier="12G", store=str(tmp_path / "store"))
    monkeypatch.setattr(travel, "address", lambda made: str(tmp_path / "store"))
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    return folder


def submitted(folder: Path, double: Provider, monkeypatch, *words: str) -> int:
    monkeypatch.setenv("HANGPROOF_RUNPOD_URL", double.url)
    words = ("--image", "docker.io/me/hangproof:1", "--gpu", ",".join(GPUS), *words, "--submit")
    return rent.run(arguments(rent, *words, run=folder.name, json=True))


def test_a_pod_is_created_as_runpod_documents(remote, monkeypatch, capsys):
    with provider((201, POD)) as double:
        assert submitted(remote, double, monkeypatch) == 0
    ((method, path, body, headers),) = double.requests
    assert (method, path, headers["Authorization"]) == ("POST", "/v2/pods", f"Bearer {KEY}")
    assert_documented(body)
    assert body["gpu"] == {"id": "NVIDIA RTX 2000 Ada Generation", "count": 1, "minCudaVersion": "13.0"}
    assert body["mounts"] == {"persistent": {"size": 200, "path": "/workspace"}}
    assert body["env"]["HF_TOKEN"] == "{{ RUNPOD_SECRET_HF_TOKEN }}"
    assert body["env"]["HANGPROOF_AUTH"] == "{{ RUNPOD_SECRET_HANGPROOF_AUTH }}"
    assert body["env"]["HANGPROOF_STOP_POD"] == "1" and body["env"]["HANGPROOF_NEEDS_GPU"] == "1"
    assert body["env"]["HANGPROOF_DATA"].startswith("/workspace/") and body["env"]["HF_HOME"].startswith("/workspace/")
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["pod"] == "7h9k2m4n6p" and "0.44" in out and KEY not in out
    written = (remote / "runpod.json").read_text()
    assert json.loads(written) == {**body, "name": f"hangproof-{remote.name.lower()}"} and KEY not in written


def test_a_pod_is_tried_on_the_next_gpu_when_runpod_has_none(remote, monkeypatch):
    none = {"title": "Bad Request", "status": 400, "detail": "There are no instances currently available"}
    with provider((400, none), (403, none), (201, POD)) as double:
        assert submitted(remote, double, monkeypatch, "--volume", "vol_x", "--data-center", "EU-RO-1") == 0
    asked = [body["gpu"]["id"] for _, _, body, _ in double.requests]
    assert asked == GPUS
    assert double.requests[0][2]["mounts"] == {"network": [{"volumeId": "vol_x", "path": "/workspace"}]}
    with provider((400, none)) as double, pytest.raises(LaunchError, match="none of these GPUs now.*no instances"):
        submitted(remote, double, monkeypatch)
    assert len(double.requests) == len(GPUS)


@pytest.mark.parametrize(
    "status, text", [(401, "does not accept the key"), (402, "balance"), (404, "refused"), (422, "refused")]
)
def test_runpods_final_refusals_are_not_repeated(remote, monkeypatch, status, text):
    with provider((status, {"title": "x", "status": status, "detail": "d", "errors": ["$: bogus"]})) as double:
        with pytest.raises(LaunchError, match=text) as caught:
            submitted(remote, double, monkeypatch)
    assert len(double.requests) == 1 and "bogus" in str(caught.value) and KEY not in str(caught.value)


def test_a_pod_needs_a_key(remote, monkeypatch):
    monkeypatch.delenv("RUNPOD_API_KEY")
    with provider((201, POD)) as double:
        with pytest.raises(LaunchError, match="RUNPOD_API_KEY is not set"):
            submitted(remote, double, monkeypatch)
        assert double.requests == []


def test_the_key_goes_only_where_it_belongs(monkeypatch):
    def asked(url: str, text: str) -> None:
        monkeypatch.setenv("HANGPROOF_RUNPOD_URL", url)
        with pytest.raises(ApiError, match=text) as caught:
            rent.call(KEY, "GET", "/v2/pods")
        assert KEY not in str(caught.value)

    with provider((200, {})) as thief, provider((307, "", {"Location": f"{thief.url}/steal"})) as double:
        asked(double.url, "HTTP 307")
        assert thief.requests == []
    asked("http://api.runpod.io", "https only")
    for answer, text in (((400, {"detail": f"bad key {KEY}"}), "bad key"), ((200, "<html>captive"), "not JSON")):
        with provider(answer) as double:
            asked(double.url, text)
