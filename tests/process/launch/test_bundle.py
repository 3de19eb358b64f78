"""A bundle trains where there is only Python: no project, no home, no network."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs_helpers import PROJECT, call, pictures, python, spec

import runs

pytestmark = pytest.mark.slow
# Where namespaces can be made, the project is hidden (an empty file system on its folder, but for its environment), and so are all networks.
ELSEWHERE = """
set -eu
mkdir "$1/venv"
mount --bind {root}/.venv "$1/venv"
mount -t tmpfs none {root}
mkdir {root}/.venv
mount --bind "$1/venv" {root}/.venv
cd /
exec env -i PATH=/usr/bin:/bin HOME="$1/home" TMPDIR="$1" PYTHON={python} bash "$2/train.sh"
"""


@pytest.fixture
def folder(data) -> Path:
    """A run of the tiny model."""
    sizes = {"model": "tiny-flux", "max_train_steps": 4, "save_every_n_steps": 2, "resolution": 64, "repeats": 1}
    made = spec(trigger="ohwx", **sizes, mixed_precision="no", sample_every_n_steps=0, workers=0)
    return runs.create(made, pictures(data / "photos"))


def test_it_trains_to_the_same_lora_where_there_is_only_python(folder, data, tmp_path):
    hidden = not subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True).returncode
    home = python("-m", "monitor", "run", str(folder), HANGPROOF_GPUS="", CUDA_VISIBLE_DEVICES="")
    assert home.returncode == 0, home.stderr[-2000:]
    here = (folder / "my-lora.safetensors").read_bytes()
    assert call("launch", "bundle", str(folder), "-o", str(tmp_path / "a.tar")).returncode == 0
    there = tmp_path / "another machine"
    (there / "home").mkdir(parents=True)
    subprocess.run(["tar", "xf", str(tmp_path / "a.tar")], cwd=there, check=True)
    shutil.rmtree(data)
    top = there / "my-lora"
    if hidden:
        script = ELSEWHERE.format(root=PROJECT, python=sys.executable)
        command = ["unshare", "--mount", "--net", "bash", "-c", script, "-", str(there), str(top)]
        env = {"PATH": os.environ["PATH"]}
    else:
        command = ["bash", str(top / "train.sh")]
        env = {"PATH": "/usr/bin:/bin", "HOME": str(there / "home"), "PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    status = json.loads((top / "outputs" / "my-lora" / "status.json").read_text())
    assert status["state"] == "completed" and status["step"] == 4
    script = (top / "outputs" / "my-lora" / "train.sh").read_text()
    assert str(top) in script and str(PROJECT) not in script
    elsewhere = (top / "outputs" / "my-lora" / "my-lora.safetensors").read_bytes()
    assert here == elsewhere


def test_without_an_environment_it_says_what_to_do(folder, data, tmp_path):
    call("launch", "bundle", str(folder), "-o", str(tmp_path / "a.tar"))
    subprocess.run(["tar", "xf", "a.tar"], cwd=tmp_path, check=True)
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        ["bash", "my-lora/train.sh"], cwd=tmp_path, env={"PATH": str(tmp_path / "bin")}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "no Python 3.11 to 3.14 with the packages of requirements.txt" in done.stderr
