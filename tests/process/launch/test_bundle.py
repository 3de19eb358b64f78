"""A bundle says what is missing where there is no Python; tests/campaigns/test_containers.py trains one."""

import shutil
import subprocess
import sys

import pytest
from runs_helpers import call, pictures, spec

import runs

pytestmark = pytest.mark.slow


def test_without_an_environment_it_says_what_to_do(data, tmp_path):
    made = spec(trigger="ohwx", model="tiny-flux", max_train_steps=4, repeats=1, sample_every_n_steps=0)
    folder = runs.create(made, pictures(data / "photos"))
    call("launch", "bundle", str(folder), "-o", str(tmp_path / "a.zip"))
    subprocess.run([sys.executable, "-m", "zipfile", "-e", "a.zip", "."], cwd=tmp_path, check=True)
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        ["bash", "my-lora/train.sh"], cwd=tmp_path, env={"PATH": str(tmp_path / "bin")}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "no Python 3.11 to 3.14 with the packages of requirements.txt" in done.stderr
