"""SkyPilot, RunPod, Vast.ai and docker: what is written for a run, and what is submitted. The providers are doubles on loopback."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from runs_helpers import pictures, python, spec

import presets
import runs
from launch import gpus, runpod, skypilot, travel, vast
from launch.__main__ import COMMANDS
from launch.common import LaunchError
from launch.store.copies import newest_manifest
from launch.store.places import open_place
from tests.network.launch.test_pods import KEY, Provider, provider

ROOT = Path(__file__).resolve().parents[3]
STORE = "s3://bucket/runs"
CHOICES = [
    (model, backend, tier)
    for model, entry in presets.models().items()
    for backend in entry["backends"]
    for tier, row in presets.tiers_of(model, backend).items()
    if not row["problem"]
]
EACH_FAMILY = [next(c for c in CHOICES if presets.models()[c[0]]["family"] == family) for family in presets.families()]


def arguments(module, *words: str):
    import argparse

    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(["RUN", *words])


def a_spec(choice=("flux-dev", "diffusers", "20G"), **fields):
    model, backend, tier = choice
    return spec(**{"model": model, "backend": backend, "tier": tier, "store": STORE, **fields})


def a_run(root: Path, **fields) -> Path:
    return runs.create(a_spec(**fields), pictures(root / "photos"))


@pytest.fixture
def clean(monkeypatch):
    """No settings of this machine."""
    for name in (*travel.STORE_SETTINGS, "HF_HOME", "SKYPILOT_VENV"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """A lease is taken within a moment."""
    (tmp_path / "limits.toml").write_text("allow_below_guards = true\n[store]\nlease_s = 1.5\n")
    monkeypatch.setenv("HANGPROOF_LIMITS", str(tmp_path / "limits.toml"))


# ---- GPUs ----


@pytest.mark.parametrize("place", ["skypilot", "runpod", "vast"])
def test_every_tier_of_every_family_has_gpus_with_its_memory(place):
    memory = {row[place]: row["memory_gb"] for row in gpus.table() if place in row}
    for choice in CHOICES:
        check_gpus(a_spec(choice), place, memory)


def check_gpus(made, place: str, memory: dict[str, int]) -> None:
    found = gpus.names(made, place)
    if presets.models()[made.model]["generated"]:
        assert found == []
        return
    assert 1 <= len(found) <= gpus.MOST
    least = max(
        presets.tiers()[made.tier]["vram_gb"], presets.tiers_of(made.model, made.backend)[made.tier]["needs_gb"]
    )
    assert all(memory[name] >= least for name in found) and [memory[n] for n in found] == sorted(
        memory[n] for n in found
    )


def test_a_run_that_no_gpu_holds_is_refused_and_the_user_can_name_one():
    made = a_spec(batch_size=64, resolution=2048)
    with pytest.raises(LaunchError, match="name one with --gpu"):
        gpus.names(made, "vast")
    assert gpus.names(made, "vast", "B200") == ["B200"]


# ---- what all have in common ----


def test_a_rented_machine_needs_a_store_that_it_can_reach():
    for store, text in (
        ("", "has no store"),
        ("/mnt/runs", "folder of this machine"),
        ("file:///mnt", "folder of this"),
    ):
        with pytest.raises(LaunchError, match=text):
            travel.address(spec(store=store))
    assert travel.address(spec(store="hf://buckets/me/runs")) == "hf://buckets/me/runs"


def test_one_pod_is_no_place_for_a_run_of_two_machines(data, clean):
    folder = a_run(data, nodes=2)
    for command in ("runpod", "vast", "docker"):
        done = python("-m", "launch", command, folder.name, "--image", "me/h:1")
        assert done.returncode == 1 and "set nodes to 1" in done.stderr, command
    assert [path.name for path in folder.glob("*.json")] == ["job.json"] and not (folder / "docker.sh").exists()


def test_a_secret_is_a_name_only(clean, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame")
    monkeypatch.setenv("WANDB_API_KEY", "open-wandb")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.example.org")
    made = a_spec()
    for module, words in ((skypilot, ()), (runpod, ("--image", "me/h:1")), (vast, ("--image", "me/h:1"))):
        args = arguments(module, *words, "--secret", "WANDB_API_KEY", "--env", "TZ=UTC")
        assert travel.secrets(made, args) == ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY"]
        text = {
            skypilot: lambda a: skypilot.render(made, a, Path("x.yaml")),
            runpod: lambda a: json.dumps(runpod.body(made, a, "NVIDIA L4")),
            vast: lambda a: json.dumps(vast.body(made, a)),
        }[module](args)
        assert "sesame" not in text and "open-wandb" not in text
        assert "https://s3.example.org" in text and '"UTC"' in text.replace("TZ: UTC", '"UTC"')
        with pytest.raises(LaunchError, match="name of a variable only"):
            travel.secrets(made, arguments(module, *words, "--secret", "A=sesame"))
        with pytest.raises(LaunchError, match="secret, so its value is not written"):
            travel.variables(made, arguments(module, *words, "--env", "HF_TOKEN=sesame"))


def test_every_command_has_a_help(clean):
    listed = python("-m", "launch", "--help").stdout
    for name, (module, text) in COMMANDS.items():
        assert name in listed and text.split()[0] in listed, name
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), name


# ---- SkyPilot ----


def test_the_skypilot_job_of_each_choice(clean):
    scripts = [check_job(a_spec(choice)) for choice in CHOICES]
    assert subprocess.run(["bash", "-n"], input="\n".join(scripts), text=True).returncode == 0


def check_job(made) -> str:
    text = skypilot.render(made, arguments(skypilot), Path("skypilot.yaml"))
    job = yaml.safe_load(text)
    generated = presets.models()[made.model]["generated"]
    assert ("accelerators" in job["resources"]) != generated
    assert job["resources"]["use_spot"] is True and job["workdir"] == str(ROOT)
    assert job["resources"]["job_recovery"] == {
        "strategy": "EAGER_NEXT_REGION",
        "max_restarts_on_errors": 0,
        "recover_on_exit_codes": [5],
    }
    assert "MOUNT" not in text and "file_mounts" not in job
    lines = job["run"].splitlines()
    restore = next(i for i, line in enumerate(lines) if "store restore s3://bucket/runs my-lora" in line)
    assert lines[restore + 1 :] == ["exec .venv/bin/python -m monitor run my-lora"]
    assert ("fetch-model" in job["setup"]) == (made.backend != "diffusers")
    assert (f"./start.sh {made.backend}" in job["setup"]) == (made.backend != "diffusers")
    assert all(value is None for value in job["secrets"].values())
    return f"{job['setup']}\n{job['run']}"


def test_a_skypilot_job_of_several_nodes_and_one_of_an_image(clean):
    made = a_spec(nodes=3, gpus=2)
    job = yaml.safe_load(skypilot.render(made, arguments(skypilot, "--image", "me/h:1", "--on-demand"), Path("x")))
    assert job["num_nodes"] == 3 and job["resources"]["image_id"] == "docker:me/h:1" and "workdir" not in job
    assert set(job["resources"]["accelerators"].values()) == {2} and job["resources"]["use_spot"] is False
    assert 'monitor node my-lora --rank "$SKYPILOT_NODE_RANK" --leader "$leader"' in job["run"]
    assert "HANGPROOF_NODE_TOKEN" in job["secrets"] and "cd /hangproof\nexport HANGPROOF_DATA=/data\n" in job["run"]


SKYPILOT_VENV = os.environ.get("SKYPILOT_VENV", "")


def sky_venv() -> Path:
    venv = Path(SKYPILOT_VENV)
    if not (SKYPILOT_VENV and (venv / "bin" / "python").exists()):
        pytest.skip("SKYPILOT_VENV names no environment with SkyPilot (pip install skypilot==0.14.1)")
    return venv


READ = """
import json, sys, yaml
from sky import Task
for path in sys.argv[1:]:
    task = Task.from_yaml_config(yaml.safe_load(open(path)))
    found = sorted((str(r.accelerators), r.use_spot, json.dumps(r.job_recovery)) for r in task.resources)
    print("task", json.dumps([path, task.num_nodes, found]))
"""


def test_skypilot_itself_takes_the_job_of_every_choice(clean, tmp_path, monkeypatch):
    venv = sky_venv()
    paths = []
    for number, choice in enumerate(CHOICES):
        path = tmp_path / f"{number}.yaml"
        path.write_text(skypilot.render(a_spec(choice), arguments(skypilot), path))
        paths.append(str(path))
    several = tmp_path / "several.yaml"
    several.write_text(skypilot.render(a_spec(nodes=2), arguments(skypilot, "--image", "me/h:1"), several))
    env = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-c", READ, *paths, str(several)],
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tasks = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("task ")]
    assert len(tasks) == len(CHOICES) + 1 and tasks[-1][1] == 2
    for _, _, resources in tasks:
        for _, spot, recovery in resources:
            assert spot and json.loads(recovery)["recover_on_exit_codes"] == [5]
            assert json.loads(recovery)["strategy"] == "EAGER_NEXT_REGION"
    wrong = tmp_path / "wrong.yaml"  # it would notice
    wrong.write_text(Path(paths[0]).read_text().replace("recover_on_exit_codes:", "recover_on_exit_codes: x #"))
    env["SKYPILOT_DEBUG"] = "0"
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-c", READ, str(wrong)], env=env, capture_output=True, timeout=500
    )
    assert done.returncode != 0


SKY = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$HOME/words"
exit "${SKY_CODE:-0}"
"""


def test_skypilot_is_submitted_once_the_run_is_in_its_store(data, tmp_path, clean, quick, monkeypatch):
    folder = a_run(data, store="memory-is-not-a-store")
    store = tmp_path / "store"
    monkeypatch.setattr(travel, "address", lambda made: str(store))
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    sky = tmp_path / "venv" / "bin" / "sky"
    sky.write_text(SKY)
    sky.chmod(0o755)
    monkeypatch.setenv("SKYPILOT_VENV", str(tmp_path / "venv"))
    monkeypatch.setenv("HOME", str(tmp_path))
    args = arguments(skypilot, "--submit")
    args.run, args.json = folder.name, False
    with pytest.raises(LaunchError, match="HF_TOKEN: set in the environment first"):
        skypilot.run(args)
    monkeypatch.setenv("HF_TOKEN", "hf_sesame")
    assert skypilot.run(args) == 0
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:2] == ["jobs", "launch"] and words[-1] == str(folder / "skypilot.yaml")
    assert words[words.index("--secret") :][:2] == ["--secret", "HF_TOKEN"] and "hf_sesame" not in " ".join(words)
    manifest = newest_manifest(open_place(str(store)).under(folder.name), folder.name)
    assert manifest is not None and {"run/run.toml", "data/0.png"} & set(manifest.files)
    monkeypatch.setenv("SKY_CODE", "1")
    with pytest.raises(LaunchError, match="did not accept the job"):
        skypilot.run(args)
    monkeypatch.setenv("SKYPILOT_VENV", str(tmp_path / "none"))
    with pytest.raises(LaunchError, match="SkyPilot is not installed"):
        skypilot.run(args)


# ---- RunPod ----


POD = {"id": "7h9k2m4n6p", "status": "PROVISIONING", "cost": 0.44}
SCHEMA = {  # CreatePodRequest of RunPod's OpenAPI document, version 2.0.0
    "name": str,
    "image": str,
    "cloud": str,
    "gpu": dict,
    "disk": int,
    "mounts": dict,
    "ports": list,
    "env": dict,
    "dataCenterIds": list,
}


def assert_documented(request: dict) -> None:
    """The body has the shape that RunPod documents."""
    assert all(isinstance(request[key], SCHEMA[key]) for key in request), request
    assert {"name", "image", "gpu"} <= set(request) and set(request["gpu"]) == {"id", "count", "minCudaVersion"}
    assert request["cloud"] in ("SECURE", "COMMUNITY") and len(request["mounts"]) == 1
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in request["env"].items())
    assert len(request["env"]) <= 50


@pytest.fixture
def remote(data, tmp_path, clean, quick, monkeypatch):
    """A run whose store is a folder, which stands for one that the provider reaches."""
    folder = a_run(data, tier="12G")
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
    written = json.loads((remote / "runpod.json").read_text())
    assert (
        written == {**body, "name": f"hangproof-{remote.name.lower()}"}
        and KEY not in (remote / "runpod.json").read_text()
    )


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


def test_a_pod_needs_a_key_and_a_gpu_and_the_right_cloud(remote, data, monkeypatch):
    monkeypatch.delenv("RUNPOD_API_KEY")
    with provider((201, POD)) as double:
        with pytest.raises(LaunchError, match="RUNPOD_API_KEY is not set"):
            submitted(runpod, remote, double, monkeypatch)
        with pytest.raises(LaunchError, match="secure cloud only"):
            submitted(runpod, remote, double, monkeypatch, "--community", "--volume", "v")
        assert double.requests == []


# ---- Vast.ai ----


OFFERS = {
    "offers": [{"id": 11, "gpu_name": "RTX 3060", "dph_total": 0.08}, {"id": 12, "gpu_name": "L4", "dph_total": 0.2}]
}


def test_an_instance_is_rented_as_vast_documents(remote, monkeypatch, capsys):
    with provider((200, OFFERS), (200, {"success": True, "new_contract": 1234568})) as double:
        assert submitted(vast, remote, double, monkeypatch) == 0
    (method, path, query, headers), (put, ask, body, _) = double.requests
    assert (method, path, headers["Authorization"]) == ("POST", "/api/v0/bundles/", f"Bearer {KEY}")
    assert (
        query["gpu_name"]["in"][0] == "RTX 3060" and query["gpu_ram"] == {"gte": 12000} and query["type"] == "ondemand"
    )
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
def test_onstart_is_short_enough_and_a_valid_script(choice, clean):
    args = arguments(vast, "--image", "me/h:1", "--secret", "A" * 90, *("--env", "B=" + "x" * 5000))
    onstart = vast.body(a_spec(choice, name="n" * 80, store="s3://" + "b" * 500), args)["onstart"]
    assert len(onstart) <= vast.MOST_ONSTART and len(onstart.encode()) <= vast.MOST_ONSTART
    assert subprocess.run(["bash", "-n"], input=onstart, text=True).returncode == 0
    with pytest.raises(LaunchError, match="4049 characters"):
        vast.checked("x" * 4049)


# ---- docker ----


def test_the_docker_command_mounts_what_the_run_uses_and_names_secrets_only(data, tmp_path, clean, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_sesame")
    (tmp_path / "bin").mkdir()
    docker = tmp_path / "bin" / "docker"
    docker.write_text('#!/usr/bin/env bash\nprintf \'%s\\n\' "$@" > "$WORDS"\n')
    docker.chmod(0o755)
    folder = a_run(data, name="my run's", store=str(tmp_path / "my store"), gpus=2)
    env = {"WORDS": str(tmp_path / "words"), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = python("-m", "launch", "docker", folder.name, "--env", "TZ=UTC", "--submit", "--json", **env)
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:2] == ["run", "--detach"] and words[-3:] == ["hangproof", "train", folder.name]
    assert words[words.index("--gpus") + 1] == "2" and int(words[words.index("--stop-timeout") + 1]) > 30
    assert words[words.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    given = [words[i + 1] for i, word in enumerate(words) if word == "--env"]
    assert "HF_TOKEN" in given and "TZ=UTC" in given and "HANGPROOF_NEEDS_GPU=1" in given
    mounts = [words[i + 1] for i, word in enumerate(words) if word == "--mount"]
    assert f"type=bind,source={folder},target=/data/outputs/{folder.name}" in mounts
    assert f"type=bind,source={tmp_path / 'my store'},target={tmp_path / 'my store'}" in mounts
    assert (tmp_path / "my store").is_dir() and (data / "models").is_dir()  # docker would make them as root
    text = (folder / "docker.sh").read_text()
    assert "hf_sesame" not in text + done.stdout + "\n".join(words) and os.access(folder / "docker.sh", os.X_OK)


def test_docker_says_what_is_missing(data, tmp_path, clean, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    folder = a_run(data)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text("#!/bin/sh\nexit 125\n")
    (tmp_path / "bin" / "docker").chmod(0o755)
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = python("-m", "launch", "docker", folder.name, "--submit", **env)
    assert done.returncode == 1 and "HF_TOKEN: set in the environment first" in done.stderr
    keys = dict.fromkeys(("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "x")
    done = python("-m", "launch", "docker", folder.name, "--submit", **env, **keys)
    assert done.returncode == 1 and "docker did not start the container" in done.stderr


# ---- what prepares a run where it arrived ----


def test_prepare_writes_the_script_for_this_machine_and_fetches_the_model(data, clean, monkeypatch):
    from launch import train

    fetched = []
    monkeypatch.setattr(runs, "fetch_model", fetched.append)
    for choice in (("sdxl", "sd-scripts", "12G"), ("flux-dev", "diffusers", "20G")):
        folder = a_run(data, name=choice[0], model=choice[0], backend=choice[1], tier=choice[2])
        for file in (folder / "train.sh", folder / "job.json"):
            file.write_text(file.read_text().replace(str(data), "/another/machine"))
        args = arguments(train, "--prepare")
        args.run, args.json = folder.name, False
        assert train.run(args) == 0
        assert str(folder) in (folder / "train.sh").read_text()
    assert fetched == ["sdxl"], "the built-in trainer fetches its own"
