"""Journeys of the image: SIGTERM to the entry point, a pod with an empty disk, SkyPilot's job. And a
bundle trains where there is only Python: no project, no home, no network.

    python -m pytest tests/campaigns/test_containers.py          6 minutes
"""

import os
import shutil
import subprocess
import sys

import pytest
from image_helpers import PATIENCE_S, container, healthy, log_of, make_image
from loopback import in_turn
from monitor_helpers import events, toy_run, wait_for
from queue_helpers import processes
from run_facts import status, weight
from runs_helpers import PROJECT, call, pictures, python, spec
from toys import undisturbed
from ui_helpers import free_port

import runs
from launch import skypilot, travel
from launch.store.copies import newest_manifest
from launch.store.places import open_place

SETTINGS = {"save_every_n_steps": 2, "resolution": 64, "mixed_precision": "no", "repeats": 1, "workers": 0}
SETTINGS |= {"model": "tiny-flux", "sample_every_n_steps": 0}
KEY = "rpa_0123456789SECRET"
POD = {"RUNPOD_POD_ID": "7h9k2m4n6p", "RUNPOD_API_KEY": KEY, "HANGPROOF_STOP_POD": "1", "HANGPROOF_STOP_AFTER_S": "1"}


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return make_image(tmp_path_factory.mktemp("image"))


def terminate(process: subprocess.Popen, root) -> None:
    """SIGTERM to the entry point, as the provider sends it."""
    process.terminate()
    assert process.wait(100) == 0, log_of(root)


def test_the_entry_point_serves_saves_every_run_at_sigterm_and_goes_on(image, tmp_path):
    root, port = tmp_path / "data", free_port()
    folder = toy_run(root / "outputs" / "toy", steps=80, pace=0.1, every=40)
    with container(image, root, port, HANGPROOF_STOP_POD="1") as process:
        wait_for(lambda: healthy(image, root, port), PATIENCE_S, "the health check")
        start = [str(image / ".venv/bin/python"), "-m", "monitor", "start", str(folder)]
        env = {"HANGPROOF_DATA": str(root), "HANGPROOF_GPUS": "", "TMPDIR": f"{tmp_path}/tmp"}
        env["PATH"] = os.environ["PATH"]
        subprocess.run(start, cwd=image, env=env, check=True, capture_output=True, timeout=60)
        wait_for(lambda: status(folder)["step"] >= 5, PATIENCE_S)
        terminate(process, root)
        assert wait_for(lambda: not processes(root), 20, "everything has ended")
    assert status(folder)["state"] == "preempted" and list(folder.glob("toy-step*-state"))
    assert "this is no pod" in log_of(root) and "a-long-secret" not in log_of(root)

    with in_turn((200, {"id": "7h9k2m4n6p", "status": "EXITED"})) as double:
        with container(image, root, port, HANGPROOF_RUNPOD_URL=double.url, **POD) as process:
            wait_for(lambda: status(folder)["state"] == "completed", PATIENCE_S, "the run goes on by itself")
            wait_for(lambda: double.requests, PATIENCE_S, "the pod stops itself")
            terminate(process, root)
    assert weight(folder) == undisturbed(80) and len(events(folder, "started")) == 2
    asked = double.requests[0]
    assert asked[:3] == ("POST", "/v2/pods/7h9k2m4n6p/action", {"action": "stop"})
    assert "nothing is left to train (toy completed)" in log_of(root) and KEY not in log_of(root)


def test_a_pod_fetches_its_run_trains_it_and_stops(image, data, tmp_path, monkeypatch):
    """An empty disk, the name of a run and its store: what a rented machine begins with."""
    store = str(tmp_path / "store")
    made = spec(max_train_steps=6, store=store, **SETTINGS)
    home = runs.create(made, pictures(data / "photos"))
    travel.upload(home)
    root, port = tmp_path / "pod" / "data", free_port()
    root.mkdir(parents=True)
    start = {"HANGPROOF_START_RUN": made.slug, "HANGPROOF_START_STORE": store, **POD}
    with in_turn((200, {"id": "7h9k2m4n6p"})) as double:
        with container(image, root, port, HANGPROOF_RUNPOD_URL=double.url, **start) as process:
            wait_for(lambda: double.requests, PATIENCE_S, "the pod stops itself")
            terminate(process, root)
    there = root / "outputs" / made.slug
    assert status(there)["state"] == "completed" and (there / f"{made.slug}.safetensors").is_file(), log_of(root)
    assert double.requests[0][1:3] == ("/v2/pods/7h9k2m4n6p/action", {"action": "stop"})
    manifest = newest_manifest(open_place(store).under(made.slug), made.slug)
    assert manifest is not None and f"run/{made.slug}.safetensors" in manifest.files, "it stopped after the last copy"


def test_skypilots_job_sets_itself_up_restores_the_run_and_trains_it(image, data, tmp_path):
    """Its two scripts with bash, in a home as SkyPilot makes it: the project in ~/sky_workdir, nothing of the run."""
    store = str(tmp_path / "store")
    made = spec(max_train_steps=6, store=store, **SETTINGS)
    travel.upload(runs.create(made, pictures(data / "photos")))
    home = tmp_path / "home"
    home.mkdir()
    (home / "sky_workdir").symlink_to(image)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(tmp_path), "HANGPROOF_GPUS": ""}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    for script in skypilot.scripts(made, store, False).values():
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=1000)
        assert done.returncode == 0, done.stderr[-3000:]
    folder = home / "hangproof-data" / "outputs" / made.slug
    assert status(folder)["state"] == "completed" and (folder / f"{made.slug}.safetensors").is_file()


# The project (but for its environment) and all networks are hidden.
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


def test_a_bundle_trains_to_the_same_lora_where_there_is_only_python(data, tmp_path):
    made = spec(max_train_steps=4, **SETTINGS)
    folder = runs.create(made, pictures(data / "photos"))
    if subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True).returncode:
        pytest.skip("no namespaces can be made here, so the project cannot be hidden")
    home = python("-m", "monitor", "run", str(folder), HANGPROOF_GPUS="", CUDA_VISIBLE_DEVICES="")
    assert home.returncode == 0, home.stderr[-2000:]
    here = (folder / "my-lora.safetensors").read_bytes()
    assert call("launch", "bundle", str(folder), "-o", str(tmp_path / "a.zip")).returncode == 0
    there = tmp_path / "another machine"
    (there / "home").mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(tmp_path / "a.zip"), str(there)], check=True)
    shutil.rmtree(data)
    top = there / "my-lora"
    script = ELSEWHERE.format(root=PROJECT, python=sys.executable)
    command = ["unshare", "--mount", "--net", "bash", "-c", script, "-", str(there), str(top)]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    trained = top / "outputs" / "my-lora"
    assert status(trained)["state"] == "completed" and status(trained)["step"] == 4
    script = (trained / "train.sh").read_text()
    assert str(top) in script and str(PROJECT) not in script
    assert here == (trained / "my-lora.safetensors").read_bytes()
