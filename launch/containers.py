"""`python -m launch docker RUN`: one run in a container of the image that the project's Dockerfile builds.

The container trains this run only; its folder, data set and models are those of this machine, so the page here shows the run and
stops it. (The page itself in a container, with all its runs in a volume, is `docker compose up`: compose.yaml.) The file is a
plain `docker run` command that a person can read. Secrets pass through by name.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import runs
from launch import common, gpus, travel
from launch.common import LaunchError
from runs.files import atomic_write
from runs.paths import datasets_dir, models_dir

if TYPE_CHECKING:
    from runs.spec import RunSpec

FILE = "docker.sh"
IMAGE = "hangproof"
DATA = "/data"
STOP_S = 45  # docker's default of 10 s is less than a pre-emption takes (monitor/config.toml: preempt_total_s)
HEAD = """#!/usr/bin/env bash
# Trains {name} in a container. Written by `python -m launch docker`. Build the image once, in the project's folder:
#   docker build --build-arg TRAINERS="{trainers}" -t {image} .
# Stop it with a checkpoint: docker stop {container}     Its log: docker logs --follow {container}
set -eu
"""


def command(spec: "RunSpec", folder: Path, args: argparse.Namespace) -> list[list[str]]:
    """`docker run` with one option a line."""
    needed = gpus.needed_gb(spec)
    lines = [
        ["docker", "run", "--detach"],
        ["--name", travel.name_there(spec)],
        *([["--gpus", "all" if args.gpu == "all" else str(spec.gpus)]] if needed else []),
        ["--shm-size", "2g"],
        ["--stop-timeout", str(STOP_S)],
    ]
    if hasattr(os, "getuid"):
        lines.append(["--user", f"{os.getuid()}:{os.getgid()}"])  # the files stay this user's
    # The number of this user has no name in the image, and libraries ask for one.
    lines += [["--env", "HOME=/tmp"], ["--env", "USER=hangproof"], ["--env", f"HF_HOME={DATA}/cache"]]
    lines += [["--env", f"{name}={value}"] for name, value in travel.variables(spec, args).items()]
    lines += [["--env", name] for name in travel.secrets(spec, args)]
    for source, target, access in mounts(spec, folder):
        if "," in str(source):
            raise LaunchError(f"docker cannot mount {source}: its path has a comma; move or rename that folder")
        lines.append(["--mount", f"type=bind,source={source},target={target}{access}"])
    return [*lines, [args.image, "train", spec.slug]]


def mounts(spec: "RunSpec", folder: Path) -> list[tuple[Path, str, str]]:
    """(folder here, folder there, ",readonly" or "") of everything that the run reads and writes."""
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    found = [
        (folder, f"{DATA}/outputs/{folder.name}", ""),
        (datasets_dir() / spec.slug, f"{DATA}/datasets/{spec.slug}", ""),
        (models_dir(), f"{DATA}/models", ""),
        (cache, f"{DATA}/cache", ""),
    ]
    if spec.control_dir:
        own = Path(spec.control_dir).expanduser().absolute()
        found.append((own, str(own), ",readonly"))
    for text in (spec.save_dir, spec.store if "://" not in spec.store else ""):
        if text:
            own = Path(text).expanduser().absolute()
            found.append((own, str(own), ""))
    return found


def render(spec: "RunSpec", folder: Path, args: argparse.Namespace) -> str:
    """The text of the script."""
    trainer = spec.backend if spec.backend != "diffusers" else ""
    head = HEAD.format(name=spec.slug, trainers=trainer, image=args.image, container=travel.name_there(spec))
    made = " ".join(shlex.quote(str(source)) for source, _, access in mounts(spec, folder) if not access)
    lines = " \\\n  ".join(" ".join(map(shlex.quote, line)) for line in command(spec, folder, args))
    return f"{head}mkdir -p {made}\nexec {lines}\n"


def submit(path: Path, secrets: list[str]) -> None:
    """Start the container. Raises LaunchError."""
    if shutil.which("docker") is None:
        raise LaunchError("docker is not installed; install it, or start the script where it is")
    env = travel.environment(path.parent, secrets)
    if subprocess.run(["bash", str(path)], stdout=sys.stderr, env=env, check=False).returncode:
        raise LaunchError("docker did not start the container; see its message above")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN and options."""
    common.add_run(parser)
    parser.add_argument("--image", default=IMAGE, help=f"the image (default: {IMAGE})")
    travel.add_variables(parser)
    parser.add_argument(
        "--gpu", default="", metavar="all", help="`all`: every GPU of this machine; else as many as the run uses"
    )
    parser.add_argument("--submit", action="store_true", help="also start the container")


def run(args: argparse.Namespace) -> int:
    """Write docker.sh; with --submit, start the container."""
    folder = common.find(args)
    spec = runs.load(folder)
    travel.one_machine(spec, "docker")
    path, secrets = folder / FILE, travel.secrets(spec, args)
    atomic_write(path, render(spec, folder, args), executable=True)
    if args.submit:
        submit(path, secrets)
    said = f"started {travel.name_there(spec)}" if args.submit else str(path)
    return common.report(args, said, {"file": str(path), "secrets": secrets, "submitted": args.submit})
