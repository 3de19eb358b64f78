"""SkyPilot: the job that is written for a run, and what is submitted."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from launch_helpers import CHOICES, a_run, a_spec, arguments
from runs_helpers import PROJECT, executable

import presets
from launch import skypilot, travel
from launch.common import LaunchError, fill
from launch.store.copies import newest_manifest
from launch.store.places import open_place
from monitor import config


def test_the_skypilot_job_of_each_family(clean):
    scripts = []
    for made in map(a_spec, {choice[:2]: choice for choice in CHOICES}.values()):
        generated = presets.models()[made.model]["generated"]
        job = skypilot.document(made, arguments(skypilot, *([] if generated else ["--gpu", "L4,RTX4090"])))
        assert ("accelerators" in job["resources"]) != generated
        assert job["resources"]["use_spot"] is True and job["workdir"] == str(PROJECT)
        recovery = {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 0, "recover_on_exit_codes": [5]}
        assert job["resources"]["job_recovery"] == recovery
        assert "MOUNT" not in str(job) and "file_mounts" not in job
        assert "store restore s3://bucket/runs my-lora" in job["run"]
        assert job["run"].splitlines()[-1] == "exec .venv/bin/python -m monitor run my-lora"
        assert ("fetch-model" in job["setup"]) == (made.backend != "diffusers")
        assert (f"./start.sh {made.backend}" in job["setup"]) == (made.backend != "diffusers")
        assert all(value is None for value in job["secrets"].values())
        scripts.append(f"{job['setup']}\n{job['run']}")
    assert subprocess.run(["bash", "-n"], input="\n".join(scripts), text=True).returncode == 0


def test_a_skypilot_job_of_several_nodes_and_one_of_an_image(clean):
    made = a_spec(nodes=3, gpus=2)
    job = skypilot.document(made, arguments(skypilot, "--image", "me/h:1", "--on-demand", "--gpu", "L4,RTX4090"))
    assert job["num_nodes"] == 3 and job["resources"]["image_id"] == "docker:me/h:1" and "workdir" not in job
    assert job["resources"]["accelerators"] == {"L4": 2, "RTX4090": 2} and job["resources"]["use_spot"] is False
    assert 'export HANGPROOF_NODE="$SKYPILOT_NODE_RANK"' in job["run"]
    assert "cd /hangproof\nexport HANGPROOF_DATA=/data\n" in job["run"]
    assert job["run"].index("rm -rf") < job["run"].index("store restore") < job["run"].index("monitor run my-lora")
    assert job["resources"]["job_recovery"]["recover_on_exit_codes"] == [5, 6]


@pytest.mark.parametrize(("failures", "waits", "code"), [(0, [], 0), (2, [30, 60], 0), (9, [30, 60, 120, 240, 450], 1)])
def test_the_job_waits_for_a_store_that_does_not_answer_and_not_for_ever(tmp_path, failures, waits, code):
    (tmp_path / "data").mkdir()
    answers = 'echo "$@" >> asked; [ "$2" = monitor ] || [ "$(wc -l < asked)" -gt "$FAILURES" ]'
    executable(tmp_path / ".venv" / "bin" / "python", f"#!/bin/sh\n{answers}\n")
    executable(tmp_path / "sleep", '#!/bin/sh\necho "$1" >> slept\n')
    script = fill("skypilot.sh", "run", root=str(tmp_path), data="data", store="s3://b/x", name="cat")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAILURES": str(failures)}
    assert subprocess.run(["bash", "-c", script], env=env).returncode == code
    slept = tmp_path / "slept"
    assert (slept.read_text().split() if slept.exists() else []) == [str(one) for one in waits]
    trains = (tmp_path / "asked").read_text().splitlines()[-1] == "-m monitor run cat"
    assert trains == (code == 0)
    assert code or config.load(tmp_path / "data" / "limits.toml").store.flush_s == 4 * 3600


def test_skypilot_itself_takes_the_job_of_every_choice(tmp_path):
    venv = Path(os.environ.get("SKYPILOT_VENV", "/nowhere"))
    if not (venv / "bin" / "python").exists():
        pytest.skip("SKYPILOT_VENV names no environment with SkyPilot (pip install skypilot==0.14.1)")
    jobs = [skypilot.document(a_spec(choice), arguments(skypilot, "--gpu", "L4,RTX4090")) for choice in CHOICES]
    jobs.append(skypilot.document(a_spec(nodes=2), arguments(skypilot, "--image", "me/h:1", "--gpu", "L4")))
    read = "import json, sys; from sky import Task; print(len([*map(Task.from_yaml_config, json.load(sys.stdin))]))"
    env = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command, text = [str(venv / "bin" / "python"), "-c", read], json.dumps(jobs)
    done = subprocess.run(command, input=text, env=env, capture_output=True, text=True, timeout=500)
    assert done.stdout.split()[-1:] == [str(len(jobs))], done.stderr[-3000:]


SKY = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$HOME/words"
exit "${SKY_CODE:-0}"
"""


def test_skypilot_is_submitted_once_the_run_is_in_its_store(data, tmp_path, clean, quick, monkeypatch, capsys):
    store = tmp_path / "store"
    folder = a_run(data, store=str(store))
    monkeypatch.setattr(travel, "address", lambda made: str(store))
    executable(tmp_path / "venv" / "bin" / "sky", SKY)
    monkeypatch.setenv("SKYPILOT_VENV", str(tmp_path / "venv"))
    monkeypatch.setenv("HOME", str(tmp_path))
    args = arguments(skypilot, "--gpu", "L4", "--submit", run=folder.name, command="vast")
    with pytest.raises(LaunchError, match="HF_TOKEN: set in the environment first"):
        skypilot.run(args)
    assert not store.exists(), "that is said before the run is copied"
    monkeypatch.setenv("HF_TOKEN", "hf_sesame")
    assert skypilot.run(args) == 0 and "`sky jobs cancel -n hangproof-" in capsys.readouterr().out
    job = yaml.safe_load((folder / "skypilot.yaml").read_text())
    assert job["resources"]["infra"] == "vast" and job["resources"]["accelerators"] == {"L4": 1}
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
