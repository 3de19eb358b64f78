"""The image without a container engine: the steps of its Dockerfile, entry point and health check run in a folder.

Only the distribution's packages and the user are left out.
"""

import contextlib
import fnmatch
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from queue_helpers import processes

ROOT = Path(__file__).resolve().parents[2]
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
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatch.filter(parts, p[3:]) if p.startswith("**/") else fnmatch.filter(above, p) for p in patterns)


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip("this is not a git checkout: the files of the image are not known")
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def make_image(folder: Path) -> Path:
    """A folder as /hangproof in the image. Its packages are those of this environment, as of a layer that is cached."""
    for name in tracked():
        if not ignored(name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / ".venv")], check=True, timeout=120)
    (site,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    own = [path for path in sys.path if path.endswith("site-packages")]
    (site / "packages.pth").write_text("".join(f"{path}\n" for path in own))
    launcher = folder / ".venv" / "bin" / "accelerate"
    launcher.write_text(f"#!{folder}/.venv/bin/python\nfrom accelerate.commands.accelerate_cli import main\n\nmain()\n")
    launcher.chmod(0o755)
    stamp = "cat requirements.txt requirements.txt | cksum > .venv/.installed-requirements.txt"
    subprocess.run(["bash", "-c", stamp], cwd=folder, check=True, timeout=60)
    for word, step in steps():
        if word != "RUN" or "apt-get" in step or "useradd" in step:  # they need root
            continue
        environment = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "TRAINERS": ""}
        command = ["bash", "-euo", "pipefail", "-c", step]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{step}: {done.stderr}"
    return folder


@contextlib.contextmanager
def container(image: Path, root: Path, port: int, **env: str):
    """The image's entry point as a process, with its data in `root`; killed at the end with all that it started."""
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
        for other in processes(root):
            with contextlib.suppress(psutil.Error):
                other.kill()
        process.kill()
        process.wait(60)


def log_of(root: Path) -> str:
    return (root.parent / "container.log").read_text(encoding="utf-8", errors="replace")


def healthy(image: Path, root: Path, port: int) -> bool:
    if shutil.which("curl") is None:
        pytest.skip("the image's health check needs curl, which is not installed here")
    words = json.loads(argument("HEALTHCHECK").partition("CMD ")[2])
    words[-1] = words[-1].replace(":7860", f":{port}")
    environment = {"PATH": os.environ["PATH"], "HOME": str(root.parent)}
    return subprocess.run(words, cwd=image, env=environment, capture_output=True, timeout=60).returncode == 0
