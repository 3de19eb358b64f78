"""A bundle: what it holds, what it says without Python. Bundles train in tests/campaigns/test_containers.py."""

import json
import shutil
import subprocess
import sys
import zipfile

import pytest
from runs_helpers import call, executable, pictures, spec

import presets
import runs
from launch import bundle
from launch.common import LaunchError

SETTINGS = {"model": "tiny-flux", "max_train_steps": 4, "resolution": 64, "mixed_precision": "no", "workers": 0}


def test_it_holds_what_trains_and_nothing_else(data, tmp_path):
    folder = runs.create(spec(**SETTINGS), pictures(data / "photos"))
    done = call("launch", "bundle", folder, "-o", tmp_path / "a.zip", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["file"] == str(tmp_path / "a.zip") and said["bytes"] == (tmp_path / "a.zip").stat().st_size
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        names = {name.removeprefix("my-lora/") for name in archive.namelist()}
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
        image = archive.getinfo("my-lora/datasets/my-lora/0.png")
        assert (modes["my-lora/train.sh"], modes["my-lora/README.txt"]) == (0o100755, 0o100644)
        assert image.compress_type == zipfile.ZIP_STORED and b"\r\n" in archive.read("my-lora/train.bat")
    tops = {name.partition("/")[0] for name in names}
    assert not tops & {"ui", "tests", "benchmarks", "app.py", ".venv", ".git", "sd_scripts_patches"}
    assert sum(name.startswith("datasets/my-lora/") for name in names) == 6  # three images with captions
    shutil.unpack_archive(tmp_path / "a.zip", tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    script, env = ["bash", tmp_path / "my-lora" / "train.sh"], {"PATH": str(tmp_path / "bin")}
    for _ in range(2):  # without a Python, then with one that has no packages
        done = subprocess.run(script, env=env, capture_output=True, text=True)
        assert done.returncode == 1 and "no Python 3.11 to 3.14 with the packages of requirements.txt" in done.stderr
        executable(tmp_path / "bin" / "python3", f'#!/bin/bash\nexec {sys.executable} -I -S "$@"\n')
    (tmp_path / "my-lora" / "wheels").mkdir()
    half = "mkdir -p .venv/bin; ln -s /bin/false .venv/bin/python"  # its pip fails
    executable(tmp_path / "bin" / "python3", f'#!/bin/bash\n[ "$2" != venv ] || {{ {half}; }}\n')
    assert subprocess.run(script, env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}, check=False).returncode == 1
    assert not (tmp_path / "my-lora" / ".venv").exists(), "the next start makes it again"


def test_folders_of_this_machine_do_not_travel(data, tmp_path):
    made = spec(**SETTINGS, save_dir="/fast/disk", store="/mnt/store", control_dir="/photos/control")
    there = bundle.portable(made)
    assert (there.save_dir, there.store, there.control_dir) == ("", "", "control/my-lora")
    assert bundle.portable(spec(store="file:///mnt/store")).store == ""
    assert bundle.portable(spec(store="hf://buckets/me/runs")).store == "hf://buckets/me/runs"
    (tmp_path / "wheels").mkdir()
    made = made.changed(control_dir=str(pictures(tmp_path / "control")))
    runs.create(made, pictures(data / "photos"))
    with pytest.raises(LaunchError, match="wheels does not exist or is empty"):
        list(bundle.entries(made, tmp_path / "wheels", models=False))
    (tmp_path / "wheels" / "x.whl").touch(), (data / "models.toml").touch()
    names = [name for name, _ in bundle.entries(made, tmp_path / "wheels", models=False)]
    assert {"wheels/x.whl", "control/my-lora/2.png", "models.toml"} <= {*names}


def test_kohyas_trainers_travel_with_their_patches_and_model_files(data, tmp_path):
    made = spec(name="sd", model="sd15", backend="sd-scripts", trigger="x")
    runs.create(made, pictures(data / "photos"))
    with pytest.raises(LaunchError, match="fetch-model sd15"):
        list(bundle.entries(made, None, models=True))
    (data / "models").mkdir()
    for name in (files := presets.models()["sd15"]["files"].values()):
        (data / "models" / name).write_bytes(b"weights")
    (data / "datasets" / "sd" / "\udcff.png").touch()  # a name that is not UTF-8
    names = {name for name, _ in bundle.entries(made, None, models=True)}
    assert "sd_scripts_patches/runner.py" in names and not any(name.startswith("trainer/") for name in names)
    assert {"datasets/sd/&#56575;.png", *(f"models/{name}" for name in files)} <= names
    bundle.write(tmp_path / "a.zip", "sd", list(bundle.entries(made, None, models=False)))
    shutil.unpack_archive(tmp_path / "a.zip", tmp_path)
    words = [sys.executable, tmp_path / "sd" / "hangproof.py", "sd-scripts", "--help"]  # as ./start.sh calls it
    assert b"sd-scripts" in subprocess.run(words, check=True, capture_output=True).stdout
