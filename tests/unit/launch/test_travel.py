"""What rented machines have in common: a store that they reach, GPUs for the run, secrets by name; docker here."""

import json
import os
import re
from types import SimpleNamespace

import pytest
import yaml
from launch_helpers import CHOICES, a_run, a_spec, arguments
from runs_helpers import call, executable, picture, pictures, spec
from ui_helpers import lora_file

import presets
import runs
from launch import containers, rent, skypilot, slurm, train, travel
from launch.common import LaunchError
from launch.store.places import open_place
from monitor import config
from monitor.run_folder import RunFolder
from monitor.state import RunState, State, spec_hash


def test_a_run_that_needs_a_gpu_says_how_much_memory_and_takes_those_that_are_named():
    for made in map(a_spec, CHOICES):
        if presets.models()[made.model]["generated"]:
            assert travel.gpu_names(made, arguments(skypilot)) == []
            continue
        needed = travel.needed_gb(made)
        needs_gb = presets.tiers_of(made.model, made.backend)[made.tier]["needs_gb"]
        assert needed >= max(presets.tiers()[made.tier]["vram_gb"], needs_gb)
        with pytest.raises(LaunchError, match=f"needs {needed:.0f} GB of GPU memory; .*--gpu"):
            travel.gpu_names(made, arguments(skypilot))
    args = arguments(skypilot, "--gpu", "NVIDIA L4, B200,")
    assert travel.gpu_names(a_spec(), args) == ["NVIDIA L4", "B200"]


def test_a_rented_machine_needs_a_store_that_it_can_reach(clean, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:sesame@127.0.0.1:9000")
    here, local = "folder of this machine", "AWS_ENDPOINT_URL is an address of this machine"
    rows = (("", "has no store"), ("/mnt/runs", here), ("file:///mnt", here), ("s3://bucket/runs", local))
    for store, text in (*rows, ("sftp://me@localhost/runs", "store is an address of this machine")):
        with pytest.raises(LaunchError, match=text):
            travel.address(spec(store=store))
    assert travel.address(spec(store="hf://buckets/me/runs")) == "hf://buckets/me/runs"


@pytest.mark.parametrize("field", ["control_dir", "extra"])
def test_a_run_that_needs_files_of_this_machine_is_not_sent_to_a_rented_one_before_it_has_a_checkpoint(
    data, tmp_path, monkeypatch, field
):
    own = str(pictures(tmp_path / "own"))
    value = own if field == "control_dir" else {"network_weights": own}
    folder = a_run(data, store=str(tmp_path / "store"), **{field: value})
    with pytest.raises(LaunchError, match=f"needs {own}, which no store carries"):
        travel.upload(folder)
    monkeypatch.setattr(travel.StoreAgent, "flush", lambda *words: "")
    (folder / f"{folder.name}-step00000010-state").mkdir()
    assert travel.upload(folder).startswith(f"{folder.name} is in ")
    picture(data / "datasets" / folder.name / "at 9:41.png")
    with pytest.raises(LaunchError, match="at 9:41.png: .* would train without it there; rename it"):
        travel.upload(folder)


def test_a_run_with_nothing_left_to_train_gets_no_machine(data, tmp_path, monkeypatch):
    folder = a_run(data, store=str(tmp_path / "store"))
    RunState(State.COMPLETED, best_step=12, spec_hash=spec_hash(folder)).save(RunFolder(folder))
    lora_file(folder / f"{folder.name}.safetensors", 12)
    executable(tmp_path / "sbatch", "#!/bin/sh\n")
    executable(tmp_path / "squeue", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for send in (travel.upload, lambda folder: slurm.submit(folder, runs.load(folder))):
        with pytest.raises(LaunchError, match=r"is already completed \(12 steps\)"):
            send(folder)


def test_one_pod_is_no_place_for_a_run_of_two_machines(data, clean):
    folder = a_run(data, nodes=2)
    for command in ("runpod", "vast", "docker"):
        done = call("launch", command, folder.name, "--image", "me/h:1")
        assert done.returncode == 1 and "set nodes to 1" in done.stderr, command
    assert [path.name for path in folder.glob("*.json")] == ["job.json"] and not (folder / "docker.yaml").exists()


def test_a_container_or_job_has_a_name_that_no_other_run_has():
    """Compose would stop the one that has the name."""
    slugs = ["cat", "cat-v1", "cat_v1", "Cat-v1", *(f"{'portrait-' * 7}lr-{rate}e-4" for rate in (1, 2))]
    for most in (50, 60):
        names = [travel.name_there(SimpleNamespace(slug=slug), most) for slug in slugs]
        assert names[:2] == ["hangproof-cat", "hangproof-cat-v1"] and len({*names}) == len(slugs)
        assert all(re.fullmatch("[a-z][a-z0-9-]*[a-z0-9]", name) and len(name) <= most for name in names)


def test_a_secret_is_a_name_only(clean, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame")
    monkeypatch.setenv("WANDB_API_KEY", "open-wandb")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.example.org")
    made = a_spec()
    for module, words in ((skypilot, ("--gpu", "L4")), (rent, ("--image", "me/h:1"))):
        args = arguments(module, *words, "--secret", "WANDB_API_KEY")
        assert travel.secrets(made, args) == ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY"]
        text = json.dumps(skypilot.document(made, args) if module is skypilot else rent.body(made, args, "NVIDIA L4"))
        assert "sesame" not in text and "open-wandb" not in text
        assert "https://s3.example.org" in text
        with pytest.raises(LaunchError, match="name of a variable only"):
            travel.secrets(made, arguments(module, *words, "--secret", "A=sesame"))
    monkeypatch.setenv("AWS_SESSION_TOKEN", "temporary")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://me:sesame@s3.example.org")
    text = json.dumps(rent.body(made, args, "NVIDIA L4"))
    assert "{{ RUNPOD_SECRET_AWS_SESSION_TOKEN }}" in text and "{{ RUNPOD_SECRET_AWS_ENDPOINT_URL_S3 }}" in text
    assert "sesame" not in text and "temporary" not in text


def test_the_compose_file_mounts_what_the_run_uses_and_docker_alone_has_its_secrets(data, tmp_path, clean, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_sesame")
    docker = 'printf \'%s\\n\' "$MY_KEY" "$@" > "$WORDS"\nexit "${CODE:-0}"\n'
    executable(tmp_path / "bin" / "docker", f"#!/usr/bin/env bash\n{docker}")
    store = tmp_path / "my $HOME, store"
    control = pictures(tmp_path / "control")
    more = {"control_dir": str(control), "environment": {"MY_KEY": "of the run"}}
    folder = a_run(data, name="my run's", store=str(store), gpus=2, **more)
    (data / "models.toml").write_text("")
    env = {"WORDS": str(tmp_path / "words"), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = call("launch", "docker", folder.name, "--submit", "--json", **env)
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "words").read_text().splitlines()
    assert words == ["of the run", "compose", "--file", str(folder / "docker.yaml"), "up", "--detach"]
    text = (folder / "docker.yaml").read_text()
    assert not any(secret in text + done.stdout for secret in ("hf_sesame", "of the run"))
    written = yaml.safe_load(text.replace("$$", "$"))
    (service,) = written["services"].values()
    assert (service["image"], service["command"]) == ("hangproof", ["train", folder.name])
    assert service["user"] == f"{os.getuid()}:{os.getgid()}" and written["name"] == "hangproof-my-run-s"
    assert int(service["stop_grace_period"].removesuffix("s")) >= config.load(environ={}).end.preempt_total_s + 10
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"]) == ("nvidia", 2)
    assert {"HF_TOKEN", "MY_KEY", "HANGPROOF_NEEDS_GPU=1"} <= set(service["environment"])
    mounts = {one["target"]: one["source"] for one in service["volumes"]}
    assert mounts[f"/data/outputs/{folder.name}"] == str(folder) and mounts[str(store)] == str(store)
    assert "$HOME" not in text.replace("$$HOME", ""), "compose would fill it in"
    own_models = "/data/models.toml"
    assert [one["target"] for one in service["volumes"] if one.get("read_only")] == [own_models, str(control)]
    assert 'TRAINERS=""' in text and json.loads(done.stdout.splitlines()[-1])["submitted"] is True
    assert store.is_dir() and (data / "models").is_dir()  # docker would make them as root
    refused = call("launch", "docker", folder.name, "--submit", CODE="125", **env)
    assert refused.returncode == 1 and "docker did not start the container (it needs the compose" in refused.stderr


@pytest.mark.parametrize("store", ["file://{}/home/kept", "~/kept"])
def test_a_store_is_the_same_folder_in_the_container(data, tmp_path, monkeypatch, store):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = a_run(data, store=store.format(tmp_path))
    mounts = {there: source for source, there, writes in containers.mounts(runs.load(folder), folder) if writes}
    for home in (str(tmp_path / "home"), containers.HOME):
        monkeypatch.setenv("HOME", home)
        assert mounts[open_place(runs.load(folder).store).address] == tmp_path / "home" / "kept"


def test_prepare_writes_the_script_for_this_machine_and_fetches_the_model(data, clean, monkeypatch):
    fetched = []
    monkeypatch.setattr(runs, "fetch_model", fetched.append)
    for choice in (("sdxl", "sd-scripts", "12G"), ("flux-dev", "diffusers", "20G")):
        folder = a_run(data, name=choice[0], model=choice[0], backend=choice[1], tier=choice[2])
        for file in (folder / "train.sh", folder / "job.json"):
            file.write_text(file.read_text().replace(str(data), "/another/machine"))
        assert train.run(arguments(train, "--prepare", run=folder.name)) == 0
        assert str(folder) in (folder / "train.sh").read_text()
    assert fetched == ["sdxl"], "the built-in trainer fetches its own"
    for file in (folder / "run.toml", folder / "job.json"):
        file.write_text(file.read_text().replace('"flux-dev"', '"of-their-models-toml"'))
    assert train.run(arguments(train, "--prepare", run=folder.name)) == 0
