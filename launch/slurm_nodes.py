"""What a Slurm cluster has. A run asks for any GPU where there is one type; of several, its user names one.

A cluster names its GPUs as its administrator likes (`a100`, `nvidia_a100_80gb_pcie`, `rtx_3090`, `1g.10gb` of a MIG GPU), so a name
does not say whether a run fits.
"""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from launch.common import LaunchError

TIMEOUT_S = 30.0  # for an answer of Slurm's commands; a busy controller takes seconds


@dataclass(frozen=True)
class Node:
    """A machine of the cluster: its processor cores as Slurm counts them, and its GPUs: how many of each type, "" for unnamed."""

    name: str
    cpus: int
    gpus: dict[str, int]


class NoAnswer(LaunchError):
    """One of Slurm's commands failed or did not answer."""


def ask(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """The output of one of Slurm's commands, in this process's environment or another one.

    Raises:
        NoAnswer: the command failed, or did not answer in time; the message has Slurm's own words.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(
            f"{command[0]} did not answer within {TIMEOUT_S:.0f} s; is slurmctld running? Try: scontrol ping"
        ) from error
    if done.returncode:
        raise NoAnswer(
            f"{command[0]} failed: {' '.join((done.stderr or done.stdout).split()) or f'exit code {done.returncode}'}"
        )
    return done.stdout


def nodes(partition: str = "", gpu: bool = True) -> list[Node] | None:
    """The machines of a partition, by default of the one that jobs go to; None where there is no Slurm on this machine.

    Raises:
        NoAnswer: Slurm does not answer.
        LaunchError: the job is to have a `gpu`, and those of the cluster are in other partitions than the default one.
    """
    if shutil.which("sinfo") is None:
        return None
    command = ["sinfo", "--noheader", "--Node", "--format=%P|%N|%c|%G"]
    rows = []
    for line in ask(*command, *([f"--partition={partition}"] if partition else [])).splitlines():
        of, name, cpus, resources = line.strip().split("|", 3)
        rows.append((of, Node(name, int(re.sub(r"\D", "", cpus) or 0), gpus_of(resources))))
    default = [node for of, node in rows if of.endswith("*")]
    if partition or not default:
        return [node for _, node in rows]
    elsewhere = sorted({of for of, node in rows if node.gpus})
    if gpu and elsewhere and not any(node.gpus for node in default):
        raise LaunchError(f"the default partition has no GPU; choose one with --partition: {', '.join(elsewhere)}")
    return default


def gpus_of(resources: str) -> dict[str, int]:
    """How many GPUs of each type a node's GRES names: `gpu:a100:4(S:0-1),shard:8` gives {"a100": 4}."""
    found: Counter[str] = Counter()
    for entry in re.sub(r"\([^)]*\)", "", resources).split(","):
        kind, *more = entry.strip().split(":")
        if kind == "gpu":
            number = more.pop() if more and more[-1].isdigit() else "1"
            found[more[0] if more else ""] += int(number)
    return dict(found)


def choose(found: list[Node], each: int) -> str | None:
    """The type of GPU to ask for, for `each` of them on a node: "" for any, None where the cluster has no GPU.

    Raises:
        LaunchError: no node has so many GPUs, or there are several types: which of them suit the run, a person knows.
    """
    if not any(node.gpus for node in found):
        return None
    most = max(sum(node.gpus.values()) for node in found)
    if most < each:
        raise LaunchError(
            f"the run needs {each} GPUs on each node, and the largest node has {most}; set gpus = {most} and nodes"
        )
    kinds = sorted({kind for node in found for kind in node.gpus if kind})
    if len(kinds) > 1:
        raise LaunchError(f"this cluster has several types of GPU; name one with --gpus-type: {', '.join(kinds)}")
    return ""
