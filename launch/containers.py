"""`python -m launch docker RUN`: one run in a container of the image that the project's Dockerfile builds.

The container trains this run only; its folder, data set and models are those of this machine, so the page here shows
the run and stops it. (The page itself in a container, with all its runs in a volume, is `docker compose up`:
compose.yaml.) The file is a compose file that a person can read and edit. Secrets pass through by name.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import runs
from launch import common, travel
from launch.common import LaunchError
from runs.paths import data_root, datasets_dir, models_dir
from runs.quoting import quote
from runs.spec import RunSpec

FILE = "docker.yaml"
IMAGE = "hangproof"
DATA, HOME = "/data", "/tmp"
STOP_S = 45  # docker's default of 10 s is less than a pre-emption takes (monitor/config.toml: preempt_total_s)
HEAD = """# Trains {name} in a container. Written by `python -m launch docker`; start it with --submit, or with
#   docker compose --file {path} up --detach
# Build the image once, in the project's folder: docker build --build-arg TRAINERS="{trainers}" -t {image} .
# Stop it with a checkpoint: docker stop {container}     Its log: docker logs --follow {container}
"""


def document(spec: RunSpec, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The compose file as a dict, for the run in `folder` here. Raises LaunchError: --secret is no name."""
    # The number of this user has no name in the image, and libraries ask for one.
    variables = {"HOME": HOME, "USER": "hangproof", "HF_HOME": f"{DATA}/cache", **travel.variables(spec)}
    given = [*(f"{name}={value}" for name, value in variables.items()), *travel.secrets(spec, args)]
    service: dict[str, Any] = {
        "image": args.image, "container_name": travel.name_there(spec), "command": ["train", spec.slug],
        "shm_size": "2gb", "stop_grace_period": f"{STOP_S}s", "environment": given,
        "volumes": [
            {"type": "bind", "source": str(source), "target": target, **({"read_only": True} if not writes else {})}
            for source, target, writes in mounts(spec, folder)
        ],
    }  # fmt: skip
    if hasattr(os, "getuid"):
        service["user"] = f"{os.getuid()}:{os.getgid()}"  # the files stay this user's
    if travel.needed_gb(spec):
        device = {"driver": "nvidia", "count": spec.gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    literal = json.loads(json.dumps(service).replace("$", "$$"))  # compose fills in variables
    return {"name": travel.name_there(spec), "services": {"train": literal}}


def mounts(spec: RunSpec, folder: Path) -> list[tuple[Path, str, bool]]:
    """(folder here, folder there, whether the run writes to it) of everything that the run reads and writes."""
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    found = [
        (folder, f"{DATA}/outputs/{folder.name}", True),
        (datasets_dir() / spec.slug, f"{DATA}/datasets/{spec.slug}", True),
        (models_dir(), f"{DATA}/models", True),
        (cache, f"{DATA}/cache", True),
        *((own, f"{DATA}/{own.name}", False) for own in [data_root() / "models.toml"] if own.is_file()),
    ]
    for text in dict.fromkeys(filter(None, (spec.control_dir, spec.save_dir, travel.own_folder(spec.store)))):
        path = Path(text).expanduser().absolute()
        there = {str(path), f"{HOME}/{text.removeprefix('~/')}"} if text.startswith("~/") else {str(path)}
        found += [(path, one, text != spec.control_dir) for one in sorted(there)]
    return found


def submit(path: Path, secrets: list[str]) -> None:
    """Start the compose file. Raises LaunchError: docker or a secret is missing, or docker refuses."""
    if shutil.which("docker") is None:
        raise LaunchError("docker is not installed; install it, or start the compose file where it is")
    env = travel.environment(path.parent, secrets)
    command = ["docker", "compose", "--file", str(path), "up", "--detach"]
    if subprocess.run(command, stdout=sys.stderr, env=env, check=False).returncode:
        raise LaunchError("docker did not start the container (it needs the compose plugin); see its message above")


OPTIONS = (
    common.RUN,
    ("--image NAME", IMAGE, "the image that the project's Dockerfile builds"),
    travel.SECRET,
    ("--submit", False, "also start the container"),
)


def run(args: argparse.Namespace) -> int:
    """Write docker.yaml; with --submit, start the container."""
    folder = runs.run_folder(args.run)
    spec = runs.load(folder)
    travel.one_machine(spec, "docker")
    path, secrets, name = folder / FILE, travel.secrets(spec, args), travel.name_there(spec)
    trainer = spec.backend if spec.backend != "diffusers" else ""
    head = HEAD.format(name=spec.slug, path=quote(str(path)), trainers=trainer, image=quote(args.image), container=name)
    travel.write_yaml(path, head, document(spec, folder, args))
    for source, _, writes in mounts(spec, folder):
        if writes:
            source.mkdir(parents=True, exist_ok=True)  # docker would make it as root
    if args.submit:
        submit(path, secrets)
    said = f"started {name}" if args.submit else str(path)
    return common.report(args, said, {"file": str(path), "secrets": secrets, "submitted": args.submit})
