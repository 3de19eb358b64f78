"""What a Slurm cluster has, and which of its GPUs a run asks for.

A cluster names its GPUs as its administrator likes (`a100`, `nvidia_a100_80gb_pcie`, `rtx_3090`, `1g.10gb` of a MIG GPU), and a
job can ask for one type or for any. So a run asks for any GPU, unless some are known to be too small for its tier or cannot
compute its precision; then it asks for the type that most suitable GPUs have.
"""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from launch.common import LaunchError

TIMEOUT_S = 30.0  # for an answer of Slurm's commands; a busy controller takes seconds
# What a type's name says, first match: (part of the name, GB of the smallest variant, computes bf16). NVIDIA's data sheets.
TYPES = (
    *(("k80", 12, False), ("p100", 12, False), ("p40", 24, False), ("v100", 16, False), ("rtx2080", 8, False)),
    *(("2080", 8, False), ("rtx6000ada", 48, True), ("rtx6000", 24, False), ("rtx8000", 48, False)),
    *(
        ("a100", 40, True),
        ("a10g", 24, True),
        ("a10", 24, True),
        ("a16", 16, True),
        ("a30", 24, True),
        ("a40", 48, True),
    ),
    *(("a4000", 16, True), ("a4500", 20, True), ("a5000", 24, True), ("a6000", 48, True), ("6000ada", 48, True)),
    *(("3070", 8, True), ("3080", 10, True), ("3090", 24, True), ("4070", 12, True), ("4080", 16, True)),
    *(
        ("4090", 24, True),
        ("5080", 16, True),
        ("5090", 32, True),
        ("l40s", 48, True),
        ("l40", 48, True),
        ("l4", 24, True),
    ),
    *(("gh200", 96, True), ("h100", 80, True), ("h200", 141, True), ("b200", 180, True), ("t4", 16, False)),
)


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


def memory_gb(kind: str) -> int | None:
    """The memory of a type of GPU by its name; None when unknown."""
    if named := re.search(r"(\d+)[ _-]?gb", kind.lower()):
        return int(named[1])
    known = _known(kind)
    return known[1] if known else None


def _known(kind: str) -> tuple[str, int, bool] | None:
    plain = re.sub(r"[^a-z0-9]", "", kind.lower())
    return next((row for row in TYPES if row[0] in plain), None)


def unsuited(kind: str, needs_gb: float, bf16: bool) -> str:
    """Why a type of GPU cannot train a run: "" when it can, or when nothing is known about it."""
    has_gb, known = memory_gb(kind), _known(kind)
    if has_gb is not None and has_gb < needs_gb:
        return f"{kind} has {has_gb} GB"
    return f"{kind} does not compute bf16" if bf16 and known and not known[2] else ""


def choose(found: list[Node], each: int, needs_gb: float, bf16: bool) -> str | None:
    """The type of GPU to ask for, for `each` of them on a node: "" for any, None where the cluster has no GPU.

    Raises:
        LaunchError: no node has so many GPUs, or none of the types can train the run.
    """
    if not any(node.gpus for node in found):
        return None
    most = max(sum(node.gpus.values()) for node in found)
    if most < each:
        raise LaunchError(
            f"the run needs {each} GPUs on each node, and the largest node has {most}; set gpus = {most} and nodes"
        )
    able = [node for node in found if sum(node.gpus.values()) >= each]
    reasons = {kind: unsuited(kind, needs_gb, bf16) for node in able for kind in node.gpus}
    if not any(reasons.values()):
        return ""
    count: Counter[str] = Counter()
    for node in able:
        count.update({kind: number for kind, number in node.gpus.items() if not reasons[kind] and number >= each})
    if not count:
        why = "; ".join(reason for reason in reasons.values() if reason)
        raise LaunchError(
            f"no GPU of this cluster fits the run ({why}); choose a smaller tier, or name one with --gpus-type"
        )
    known = {kind: number for kind, number in count.items() if memory_gb(kind) is not None}
    return max(known or count, key=lambda kind: (known or count)[kind])
