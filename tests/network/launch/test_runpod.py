"""RunPod and Vast.ai: the machine that is rented for a run. The providers are doubles on loopback."""

import json
import subprocess
from pathlib import Path

import pytest
from launch_helpers import CHOICES, a_run, a_spec, arguments
from provider_server import KEY, Provider, provider

import presets
import runs
from launch import gpus, runpod, travel, vast
from launch.common import LaunchError

EACH_FAMILY = [next(c for c in CHOICES if presets.models()[c[0]]["family"] == family) for family in presets.families()]
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
def remote(tmp_path, monkeypatch):
    """A run whose store is a folder, which stands for one that the provider reaches; a lease is taken within a moment."""
    for name in (*travel.STORE_SETTINGS, "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "limits.toml").write_text("allow_below_guards = true\n[store]\nlease_s = 1.5\n")
    monkeypatch.setenv("HANGPROOF_LIMITS", str(tmp_path / "limits.toml"))
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "data"))
    folder = a_run(tmp_path / "data", tier="12G")
    monkeypatch.setattr(travel, "address", lambda made: str(tmp_path / "store"))
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    monkeypatch.setenv("VAST_API_KEY", KEY)
    return folder


def submitted(module, folder: Path, double: Provider, monkeypatch, *words: str) -> int:
    monkeypatch.setenv("HANGPROOF_RUNPOD_URL", double.url)
    monkeypatch.setenv("HANGPROOF_VAST_URL", double.url)
    args = arguments(module, "--image", "docker.io/me/hangproof:1", *words, "--submit")
    args.run, args.json = folder.name, True
    return module.run(args)


def test_a_pod_is_created_as_runpod_documents(remote, monkeypatch, capsys):
    with provider((201, POD)) as double:
        assert submitted(runpod, remote, double, monkeypatch) == 0
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
        assert submitted(runpod, remote, double, monkeypatch, "--volume", "vol_x", "--data-center", "EU-RO-1") == 0
    asked = [body["gpu"]["id"] for _, _, body, _ in double.requests]
    assert len(set(asked)) == 3 and asked == gpus.names(runs.load(remote), "runpod")[:3]
    assert double.requests[0][2]["mounts"] == {"network": [{"volumeId": "vol_x", "path": "/workspace"}]}
    with provider((400, none)) as double, pytest.raises(LaunchError, match="none of these GPUs now.*no instances"):
        submitted(runpod, remote, double, monkeypatch)
    assert len(double.requests) == len(gpus.names(runs.load(remote), "runpod"))


@pytest.mark.parametrize("status, text", [(401, "does not accept the key"), (402, "balance"), (422, "refused")])
def test_runpods_final_refusals_are_not_repeated(remote, monkeypatch, status, text):
    with provider((status, {"title": "x", "status": status, "detail": "d", "errors": ["$: bogus"]})) as double:
        with pytest.raises(LaunchError, match=text) as caught:
            submitted(runpod, remote, double, monkeypatch)
    assert len(double.requests) == 1 and "bogus" in str(caught.value) and KEY not in str(caught.value)


def test_a_pod_needs_a_key_and_a_gpu_and_the_right_cloud(remote, monkeypatch):
    monkeypatch.delenv("RUNPOD_API_KEY")
    with provider((201, POD)) as double:
        with pytest.raises(LaunchError, match="RUNPOD_API_KEY is not set"):
            submitted(runpod, remote, double, monkeypatch)
        with pytest.raises(LaunchError, match="secure cloud only"):
            submitted(runpod, remote, double, monkeypatch, "--community", "--volume", "v")
        assert double.requests == []


OFFERS = {
    "offers": [{"id": 11, "gpu_name": "RTX 3060", "dph_total": 0.08}, {"id": 12, "gpu_name": "L4", "dph_total": 0.2}]
}


def test_an_instance_is_rented_as_vast_documents(remote, monkeypatch, capsys):
    with provider((200, OFFERS), (200, {"success": True, "new_contract": 1234568})) as double:
        assert submitted(vast, remote, double, monkeypatch) == 0
    (method, path, query, headers), (put, ask, body, _) = double.requests
    assert (method, path, headers["Authorization"]) == ("POST", "/api/v0/bundles/", f"Bearer {KEY}")
    assert query["gpu_name"]["in"][0] == "RTX 3060" and query["gpu_ram"] == {"gte": 12000}
    assert query["type"] == "ondemand"
    assert query["cuda_max_good"] == {"gte": 13.0}
    assert query["order"] == [["dph_total", "asc"]] and query["rentable"] == {"eq": True}
    assert (put, ask) == ("PUT", "/api/v0/asks/11/")
    assert body["image"] == "docker.io/me/hangproof:1" and body["runtype"] == "ssh_direct" and "price" not in body
    assert body["env"]["-p 7860:7860"] == "1" and "HF_TOKEN" not in body["env"] and "HANGPROOF_AUTH" not in body["env"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["instance"] == "1234568"
    assert KEY not in (remote / "vast.json").read_text()


def test_an_offer_that_is_gone_is_passed_over(remote, monkeypatch):
    gone = {"success": False, "error": "no_such_ask", "msg": "error 404/3603: no_such_ask"}
    rented = (200, {"success": True, "new_contract": 7})
    with provider((200, OFFERS), (404, gone), rented) as double:
        assert submitted(vast, remote, double, monkeypatch, "--bid", "0.2", "--volume", "9") == 0
    assert [path for _, path, _, _ in double.requests[1:]] == ["/api/v0/asks/11/", "/api/v0/asks/12/"]
    assert double.requests[0][2]["type"] == "bid" and double.requests[2][2]["price"] == 0.2
    assert double.requests[2][2]["volume_info"] == {"create_new": False, "volume_id": 9, "mount_path": "/workspace"}
    for answers in ([(200, {"offers": []})], [(200, OFFERS), (410, gone)], [(200, OFFERS), (200, gone)]):
        with provider(*answers) as double, pytest.raises(LaunchError, match="no offer now"):
            submitted(vast, remote, double, monkeypatch)


@pytest.mark.parametrize("choice", EACH_FAMILY, ids="/".join)
def test_onstart_is_short_enough_and_a_valid_script(choice):
    args = arguments(vast, "--image", "me/h:1", "--secret", "A" * 90, *("--env", "B=" + "x" * 5000))
    onstart = vast.body(a_spec(choice, name="n" * 80, store="s3://" + "b" * 500), args)["onstart"]
    assert len(onstart) <= vast.MOST_ONSTART and len(onstart.encode()) <= vast.MOST_ONSTART
    assert subprocess.run(["bash", "-n"], input=onstart, text=True).returncode == 0
    with pytest.raises(LaunchError, match="4049 characters"):
        vast.checked("x" * 4049)
