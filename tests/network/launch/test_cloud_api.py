"""One machine is rented, whatever becomes of the answer; and a pod keeps its variables to root. The providers are on loopback."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from loopback import Request, answering
from provider_server import KEY, Provider, provider
from runs_helpers import spec

from launch import runpod, travel, vast
from launch.cloud_api import Api, ApiError
from launch.common import LaunchError

OFFERS = {"offers": [{"id": 12, "gpu_name": "L4", "dph_total": 0.2}]}


@pytest.fixture
def clean(monkeypatch):
    """No settings of this machine."""
    for name in (*travel.STORE_SETTINGS, "HF_HOME"):
        monkeypatch.delenv(name, raising=False)


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

    def made(self, path: str, body: dict) -> dict:
        number = str(100 + len(self.machines))
        self.machines.append({"id": number, "name": body.get("name"), "label": body.get("label")})
        if path.startswith("/v2"):
            return {"id": number, "status": "PROVISIONING", "cost": 0.44}
        return {"success": True, "new_contract": number}

    def answer(self, request: Request) -> tuple[int, object] | None:
        method, path = request.method, request.path
        if path == "/api/v0/bundles/":
            return 200, OFFERS
        if method == "GET":
            self.looks += 1
            if self.listing == "broken":
                return 401, {"detail": "no"}
            shown = self.machines if self.looks > self.late else []
            return 200, shown if path == "/v2/pods" else {"instances": shown}
        self.creations += 1
        fault = self.faults.pop(0) if self.faults else ""
        if fault in ("429", "503 refused"):
            return int(fault[:3]), {"detail": "busy"}
        made = self.made(path, request.json)
        if fault == "drop":
            return None
        return (502, "<html>bad gateway</html>") if fault else (201, made)


@contextlib.contextmanager
def served(cloud: Cloud) -> Iterator[Cloud]:
    with answering(cloud.answer) as server:
        cloud.url = server.url
        yield cloud


def rented(module, cloud: Cloud, patience_s: float = 20.0) -> str:
    """The number of the machine that the command gets."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    made = spec(tier="20G", store="s3://bucket/runs")
    api = Api("the provider", cloud.url, KEY, pause_s=0.01, patience_s=patience_s)
    answer = module.create(api, made, parser.parse_args(["RUN", "--image", "me/h:1"]), ["L4"])
    return str(answer["id"] if module is runpod else answer[0])


@pytest.mark.parametrize("module", [runpod, vast])
@pytest.mark.parametrize("fault", ["502", "drop"])
@pytest.mark.parametrize("late", [0, 2])
def test_one_machine_is_rented_when_its_creation_is_not_confirmed(module, fault, late, clean):
    with served(Cloud([fault], late=late)) as cloud:
        number = rented(module, cloud)
    assert [one["id"] for one in cloud.machines] == [number] == ["100"], "it is found, and no second one is made"
    assert cloud.creations == 1


@pytest.mark.parametrize("module", [runpod, vast])
def test_a_creation_that_failed_is_repeated_after_a_look(module, clean):
    with served(Cloud(["503 refused", "429"])) as cloud:
        rented(module, cloud)
    assert cloud.creations == 3 and len(cloud.machines) == 1
    assert cloud.looks == 3, "after the 503; a 429 says that nothing was made"


@pytest.mark.parametrize("module", [runpod, vast])
def test_an_unknown_machine_is_named_where_the_list_cannot_be_read(module, clean):
    with served(Cloud(["502"], listing="broken")) as cloud:
        with pytest.raises(LaunchError) as caught:
            rented(module, cloud)
    (one,) = cloud.machines
    name = one["name"] or one["label"]
    assert name in str(caught.value) and "console" in str(caught.value) and "costs money" in str(caught.value)
    assert name.startswith("hangproof-") and cloud.creations == 1


def test_a_provider_that_fails_for_long_names_the_machine_to_look_for(clean):
    with served(Cloud(["503 refused"] * 1000)) as cloud:
        with pytest.raises(LaunchError, match="HTTP 503.*Look for the machine hangproof-"):
            rented(runpod, cloud, patience_s=0.5)


def test_another_machine_of_the_same_run_is_not_taken_for_the_new_one(clean):
    with served(Cloud([])) as cloud:
        first = rented(runpod, cloud)
        cloud.faults = ["502"]
        assert rented(runpod, cloud) != first
    assert len(cloud.machines) == 2


# ---- answers ----


def api(double: Provider, **more) -> Api:
    return Api("RunPod", double.url, KEY, pause_s=0.01, **more)


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


# ---- /etc/environment of an instance of Vast.ai ----


def start_pod(etc: Path, **variables: str) -> str:
    """Run the part of `onstart` that writes the file; what it prints."""
    head = vast.ONSTART.partition("export HANGPROOF_ALLOWED_HOSTS")[0].replace("/etc/environment", str(etc))
    env = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(["bash", "-c", head], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_each_start_of_a_pod_writes_its_variables_once_and_for_root_only(tmp_path):
    etc = tmp_path / "environment"
    etc.write_text('LANG="C.UTF-8"\n')
    for key in ("first", "second", "second"):
        assert start_pod(etc, HF_TOKEN=f"hf_{key}", HANGPROOF_AUTH="me:it's # a\tsecret") == ""
    lines = etc.read_text().splitlines()
    assert lines[0] == 'LANG="C.UTF-8"', "what the image has stays"
    assert [line for line in lines if line.startswith("HF_TOKEN=")] == ["HF_TOKEN=hf_second"]
    assert lines.count("HANGPROOF_AUTH=me:it's # a\tsecret") == 1 and "hf_first" not in etc.read_text()
    assert stat.S_IMODE(etc.stat().st_mode) == 0o600


def test_a_pod_starts_where_the_file_cannot_be_written(tmp_path):
    assert "cannot be written" in start_pod(tmp_path / "missing" / "environment", HF_TOKEN="hf_x")
