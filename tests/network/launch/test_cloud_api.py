"""One machine is rented, whatever becomes of the answer; and a pod keeps its variables to root. The providers are on loopback."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from loopback import Request, answering

from launch import runpod, vast
from launch.cloud_api import Api
from launch.common import LaunchError

KEY = "key-of-the-account"


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
        self.machines.append(
            {"id": str(100 + len(self.machines)), "name": body.get("name"), "label": body.get("label")}
        )
        if path.startswith("/v2"):
            return {**POD, "id": self.machines[-1]["id"]}
        return {"success": True, "new_contract": self.machines[-1]["id"]}

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
    args = arguments(module, "--image", "me/h:1")
    api = Api("the provider", cloud.url, KEY, pause_s=0.01, patience_s=patience_s)
    answer = module.create(api, a_spec(), args, ["L4"])
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
