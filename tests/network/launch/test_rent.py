"""RunPod: exactly one pod is rented for a run, whatever becomes of the answer. RunPod is a double on loopback."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launch_helpers import a_run, a_spec, arguments
from loopback import Request, answering
from provider_server import KEY, Provider, provider

from launch import rent, travel
from launch.common import LaunchError
from launch.rent import Api, ApiError


@dataclass
class Cloud:
    """Creates a machine for each request, answers as `faults` says (then properly), and lists what it created."""

    faults: list[str]  # "502", "503 refused" (nothing created), "drop", "429"
    listing: str = "ok"  # or "broken"
    late: int = 0  # the list shows a machine only after so many looks
    machines: list[dict] = field(default_factory=list)
    creations: int = 0
    looks: int = 0
    url: str = ""

    def answer(self, request: Request) -> tuple[int, object] | None:
        if request.method == "GET":
            self.looks += 1
            if self.listing == "broken":
                return 401, {"detail": "no"}
            shown = self.machines if self.looks > self.late else []
            return 200, shown
        self.creations += 1
        fault = self.faults.pop(0) if self.faults else ""
        if fault in ("429", "503 refused"):
            return int(fault[:3]), {"detail": "busy"}
        made = {"id": str(100 + len(self.machines)), "name": request.json.get("name")}
        self.machines.append(made)
        if fault == "drop":
            return None
        return (502, "<html>bad gateway</html>") if fault else (201, made)


@contextlib.contextmanager
def served(cloud: Cloud) -> Iterator[Cloud]:
    with answering(cloud.answer) as server:
        cloud.url = server.url
        yield cloud


def rented(cloud: Cloud, patience_s: float = 20.0) -> str:
    """The number of the machine that the command gets."""
    api = Api(cloud.url, KEY, pause_s=0.01, patience_s=patience_s)
    return str(rent.create(api, a_spec(), arguments(rent, "--image", "me/h:1"), ["L4"])["id"])


@pytest.mark.parametrize("fault", ["502", "drop"])
@pytest.mark.parametrize("late", [0, 2])
def test_one_machine_is_rented_when_its_creation_is_not_confirmed(fault, late, clean):
    with served(Cloud([fault], late=late)) as cloud:
        number = rented(cloud)
    assert [one["id"] for one in cloud.machines] == [number] == ["100"], "it is found, and no second one is made"
    assert cloud.creations == 1


def test_a_creation_that_failed_is_repeated_after_a_look(clean):
    with served(Cloud(["503 refused", "429"])) as cloud:
        rented(cloud)
    assert cloud.creations == 3 and len(cloud.machines) == 1
    assert cloud.looks == 3, "after the 503; a 429 says that nothing was made"


def test_an_unknown_machine_is_named_where_the_list_cannot_be_read(clean):
    with served(Cloud(["502"], listing="broken")) as cloud:
        with pytest.raises(LaunchError) as caught:
            rented(cloud)
    (one,) = cloud.machines
    name = one["name"]
    assert name in str(caught.value) and "console" in str(caught.value) and "costs money" in str(caught.value)
    assert name.startswith("hangproof-") and cloud.creations == 1


def test_a_provider_that_fails_for_long_names_the_machine_to_look_for(clean):
    with served(Cloud(["503 refused"] * 1000)) as cloud:
        with pytest.raises(LaunchError, match="HTTP 503.*Look for the pod hangproof-"):
            rented(cloud, patience_s=0.5)


def test_another_machine_of_the_same_run_is_not_taken_for_the_new_one(clean):
    with served(Cloud([])) as cloud:
        first = rented(cloud)
        cloud.faults = ["502"]
        assert rented(cloud) != first
    assert len(cloud.machines) == 2


GPUS = ["NVIDIA RTX 2000 Ada Generation", "NVIDIA RTX A4000", "NVIDIA L4"]
POD = {"id": "7h9k2m4n6p", "status": "PROVISIONING", "cost": 0.44}
# CreatePodRequest of RunPod's OpenAPI document, version 2.0.0
SCHEMA = dict.fromkeys(("name", "image", "cloud"), str) | dict.fromkeys(("gpu", "mounts", "env"), dict)
SCHEMA |= {"disk": int, "ports": list, "dataCenterIds": list}


def assert_documented(request: dict) -> None:
    """The body has the shape that RunPod documents."""
    assert all(isinstance(request[key], SCHEMA[key]) for key in request), request
    assert {"name", "image", "gpu"} <= set(request) and set(request["gpu"]) == {"id", "count", "minCudaVersion"}
    assert request["cloud"] in ("SECURE", "COMMUNITY") and len(request["mounts"]) == 1
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in request["env"].items())
    assert len(request["env"]) <= 50


@pytest.fixture
def remote(clean, quick, tmp_path, monkeypatch):
    """A run whose store is a folder, in place of one that the provider reaches; a lease is taken at once."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "data"))
    folder = a_run(tmp_path / "data", tier="12G")
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


def test_a_pod_needs_a_key_and_a_gpu_and_the_right_cloud(remote, monkeypatch):
    monkeypatch.delenv("RUNPOD_API_KEY")
    with provider((201, POD)) as double:
        with pytest.raises(LaunchError, match="RUNPOD_API_KEY is not set"):
            submitted(remote, double, monkeypatch)
        with pytest.raises(LaunchError, match="secure cloud only"):
            submitted(remote, double, monkeypatch, "--community", "--volume", "v")
        assert double.requests == []


def api(double: Provider, **more) -> Api:
    return Api(double.url, KEY, pause_s=0.01, **more)


def test_passing_faults_are_tried_again():
    busy = {"title": "Too Many Requests", "status": 429, "detail": "rate limit exceeded for the minute window"}
    with provider((429, busy, {"Retry-After": "0"}), (503, "down"), (0, ""), (200, {"id": "p"})) as double:
        assert api(double).call("POST", "/v2/pods/p/action", {"action": "stop"}) == {"id": "p"}
        assert len(double.requests) == 4


def test_the_key_goes_only_where_it_belongs():
    with provider((200, {})) as thief, provider((307, "", {"Location": f"{thief.url}/steal"})) as double:
        with pytest.raises(ApiError, match="HTTP 307"):
            api(double).call("GET", "/v2/pods")
        assert thief.requests == []
    with pytest.raises(ApiError, match="https only"):
        Api("http://api.runpod.io", KEY).call("GET", "/v2/pods")
    with provider((400, {"detail": f"bad key {KEY}"})) as double, pytest.raises(ApiError) as caught:
        api(double).call("GET", "/v2/pods")
    assert KEY not in str(caught.value)


def test_an_answer_that_is_no_json_is_reported():
    with provider((200, "<html>captive portal</html>")) as double, pytest.raises(ApiError, match="not JSON"):
        api(double).call("GET", "/v2/pods")
