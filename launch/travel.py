"""What a run needs to go to a rented machine: a store to travel by, names of secrets, the options of these commands.

A rented machine has no disk of ours. So the run's files, its data set and its checkpoints travel by the store of its
spec: home copies them there before the machine starts, and the machine fetches them and keeps copying. No file that is
written here holds a secret: only the name of the variable, which the provider fills in on the machine.
"""

import argparse
import os
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import presets
from guards.checkpoint import files_below
from launch.common import LaunchError, Option
from monitor import config
from monitor.process.platform import LOCK, is_held
from monitor.run_folder import RunFolder
from monitor.state import nothing_left
from monitor.store import LeaseState, StoreAgent
from presets.estimate import estimate
from runs.env_file import is_secret, read
from runs.files import atomic_write, checksum
from runs.paths import datasets_dir
from runs.spec import RunSpec

# Variables with which the libraries of a store log in; others, such as a key file, are named with --secret.
STORE_SECRETS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "az": ("AZURE_STORAGE_CONNECTION_STRING",),
    "hf": ("HF_TOKEN",),
}
OPTIONAL = ("AWS_SESSION_TOKEN",)  # temporary keys have one, and are none without it
# Copied, but for an address with a password, which is a secret.
STORE_SETTINGS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "HF_ENDPOINT")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NEEDS_GPU = "HANGPROOF_NEEDS_GPU"  # read by monitor/recovery.py: without its GPU the run does not start
DISK_GB = 200
CUDA = "13.0"  # of PyTorch's wheels on PyPI, in the image (pytorch/pytorch, RELEASE.md): older drivers cannot run them
ANSWER_S = 120.0  # for a store that does not answer before the run goes there
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")

SECRET: Option = ("--secret NAME", [], "another secret variable, such as WANDB_API_KEY; only its name is written")
RENTED: tuple[Option, ...] = (  # the options that the commands for rented machines share
    ("--gpu NAMES", "", "the GPU as the provider names it, or several with commas between: the first that it has"),
    ("--disk GB", DISK_GB, f"disk for the base model and the run (default: {DISK_GB})"),
    SECRET,
    ("--submit", False, "also start it there; this costs money"),
)


def address(spec: RunSpec) -> str:
    """The store of a run, if another machine can reach it.

    Raises LaunchError: it has none, or one on this machine.
    """
    own, used = own_folder(spec.store), {"s3": "AWS_", "hf": "HF_"}.get(urlsplit(spec.store).scheme, "-")
    addresses = {name: v for name, v in os.environ.items() if name in STORE_SETTINGS and name.startswith(used)}
    local = [name for name, v in {**addresses, "store": spec.store}.items() if urlsplit(v).hostname in LOOPBACK]
    if own or local or not spec.store:
        what = f"its store {own} is a folder of this machine" if own else "it has no store"
        what = f"{local[0]} is an address of this machine" if local else what
        fix = "a rented machine loses its disk; set `store` in run.toml to hf://buckets/ME/runs or s3://BUCKET/runs"
        raise LaunchError(f"{spec.slug}: {what}, and {fix}")
    return spec.store


def own_folder(store: str) -> str:
    """The folder of this machine that a store is, as it was written; "" where it is another kind of store."""
    scheme, separator, rest = store.partition("://")
    return store if not separator else f"/{rest.lstrip('/')}" if scheme == "file" else ""


def one_machine(spec: RunSpec, place: str) -> None:
    """Raises LaunchError: the run needs several machines, and `place` starts one."""
    if spec.nodes > 1:
        several = f"{spec.slug} trains on {spec.nodes} machines, and {place} starts one"
        raise LaunchError(f"{several}; use slurm or skypilot, or set nodes to 1")


def needed_gb(spec: RunSpec) -> float:
    """The GPU memory that a run needs in GB: its tier's, or the estimate if that is more; 0 where a CPU trains it."""
    if presets.models()[spec.model]["generated"]:
        return 0.0
    return max(float(presets.tiers()[spec.tier]["vram_gb"]), float(estimate(spec.model_dump())["peak_gb"]))


def gpu_names(spec: RunSpec, args: argparse.Namespace) -> list[str]:
    """The GPUs of --gpu; [] for a CPU. Raises LaunchError: the run needs one, and none is named."""
    names = [name.strip() for name in args.gpu.split(",") if name.strip()]
    if not names and (needed := needed_gb(spec)):
        raise LaunchError(f"the run needs {needed:.0f} GB of GPU memory; name a GPU with it, or several, with --gpu")
    return names


def secrets(spec: RunSpec, args: argparse.Namespace) -> list[str]:
    """The names of the secret variables that the run needs there: of its store, of a gated model, of the run
    itself, of --secret."""
    if wrong := [name for name in args.secret if not VARIABLE.fullmatch(name)]:
        first = wrong[0].partition("=")[0]
        raise LaunchError(f"--secret {first}: write the name of a variable only; its value stays here")
    model = ("HF_TOKEN",) if presets.models()[spec.model]["gated"] else ()
    keys = STORE_SECRETS.get(urlsplit(spec.store).scheme, ())
    store = [name for name in keys if name not in OPTIONAL or os.environ.get(name)]
    store += [name for name in STORE_SETTINGS if is_secret(name, os.environ.get(name, ""))]
    return [*dict.fromkeys((*store, *model, *spec.secrets, *args.secret))]


def environment(folder: Path, secrets: list[str]) -> dict[str, str]:
    """This process's environment with the run's own secrets, for the program that starts it elsewhere.

    Raises LaunchError: a secret has no value.
    """
    found = {**os.environ, **read(folder)}
    if missing := [name for name in secrets if not found.get(name)]:
        raise LaunchError(f"{', '.join(missing)}: set in the environment first; what starts the run passes secrets on")
    return found


def variables(spec: RunSpec) -> dict[str, str]:
    """The variables that are no secret."""
    found = {name: v for name in STORE_SETTINGS if (v := os.environ.get(name)) and not is_secret(name, v)}
    return found | ({NEEDS_GPU: "1"} if needed_gb(spec) else {})


def fetches_files(spec: RunSpec) -> bool:
    """Whether the base model is files of ours to fetch (`runs fetch-model`); the built-in trainer fetches its own."""
    model = presets.models()[spec.model]
    return presets.backends()[spec.backend]["loads"] == "files" and not model["generated"]


def name_there(spec: RunSpec, most: int = 60) -> str:
    """The name of the machine or job, which no other run has: letters, digits and `-`, starting with a letter."""
    text = re.sub(r"[^a-z0-9]+", "-", spec.slug.lower()).strip("-")
    if text != spec.slug or len(text) > most - 10:
        text = f"{text[: most - 19].rstrip('-')}-{checksum(spec.slug.encode())[:8]}"
    return f"hangproof-{text}"


def upload(folder: Path) -> str:
    """Copy the run and its data set into its store, by the process that copies a training; a sentence that says so.

    Fetches what is newer there. Raises LaunchError: it trains here, is complete, needs files of here; the store fails.
    """
    if is_held(folder / LOCK):
        raise LaunchError(f"{folder.name} trains on this machine; stop it first: python -m monitor stop {folder.name}")
    if done := nothing_left(folder):
        raise LaunchError(f"{folder.name} is {done}")
    agent = StoreAgent(RunFolder(folder), config.load().store)
    fields = agent.folder.spec
    named = [os.path.expanduser(str(one)) for one in (fields.get("control_dir"), *fields.get("extra", {}).values())]
    here = next((path for path in named if os.path.isabs(path) and os.path.exists(path)), "")
    if here and not any(folder.glob("*-state")):  # a checkpoint has what the run began with
        raise LaunchError(f"{folder.name} needs {here}, which no store carries; train it here, or without that")
    from launch.store.manifest import check_member  # and with it fsspec

    data = datasets_dir() / folder.name
    for path in files_below(data, hidden=False):
        try:
            check_member(f"data/{path.relative_to(data).as_posix()}", folder.name)
        except ValueError as error:
            without = "a store carries no file of this name, and the run would train without it there; rename it"
            raise LaunchError(f"{path}: {without}") from error

    def left_s() -> float:
        over = agent.view.lease in (LeaseState.REFUSED, LeaseState.LOST, LeaseState.UNUSABLE)
        return 0.0 if over or (agent.view.ready and agent.view.error) else ANSWER_S - agent.unreachable_s()

    try:
        why = agent.flush(left_s, time.sleep)
    finally:
        agent.close(agent.limits.release_s)
    if why:
        raise LaunchError(f"{folder.name} is not copied to {agent.address}: {agent.view.error or agent.view.message}")
    return f"{folder.name} is in {agent.address}"


def write_yaml(path: Path, head: str, value: dict[str, Any]) -> None:
    """Write a YAML file for people, with comments at its head; texts of several lines are blocks."""
    import yaml

    class Block(yaml.SafeDumper):
        def text(self, value: str) -> yaml.ScalarNode:
            return self.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Block.add_representer(str, Block.text)
    atomic_write(path, head + yaml.dump(value, Dumper=Block, sort_keys=False, allow_unicode=True, width=1000))
