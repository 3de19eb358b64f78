"""The group of processes that train one LoRA together: is it the one that the run asks for, and how long may one wait?

accelerate joins its processes to a group only where it finds a GPU. Without one, each of them trains the whole run
alone, and all write the same files (measured with accelerate 1.6 and 1.15 and `--multi_gpu`: every rank sees one
process, no gradient is averaged, the run is called completed). So the script exports how many processes it means
(`HANGPROOF_WORLD`): `check_launcher` compares that with what was started, `choose_backend` lets the ranks meet over
gloo on processors, and `check` looks at the group that was formed. Every rank does all three before it writes a file.

Nobody waits for ever: the group has a limit to form, its collectives have a timeout, and a barrier that expires names
the phase of each rank of this machine.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

from guards import deadline, heartbeat, limits
from guards.deadline import Deadline
from guards.reading import number

VARIABLE = "HANGPROOF_WORLD"
NODE_VARIABLE = "HANGPROOF_NODE"
USE_CPU = "ACCELERATE_USE_CPU"
ONE_GPU = "Set gpus to 1 and write the script again: python -m runs render NAME"
RENDER = "set nodes and gpus to what is there and write its script again: python -m runs render NAME"


class WorldError(RuntimeError):
    """The processes that run are not the ones that the run asks for; the message says which numbers and what to do."""


def rank() -> int:
    """The number of this process, 0 for the one that writes the files."""
    return number("RANK", 0)


def size() -> int:
    """How many processes the launcher says it started, on all machines."""
    return number("WORLD_SIZE", 1)


def local_size() -> int:
    """How many of them run on this machine."""
    return number("LOCAL_WORLD_SIZE", size())


def check_launcher() -> None:
    """Compare what the launcher started with what the run asks for. Needs no torch: it can be a rank's first act.

    Raises:
        WorldError: fewer or more processes than the run asks for, or this is not the machine that starts it.
    """
    wanted, started = number(VARIABLE, 0), size()
    if wanted and wanted != started:
        raise WorldError(
            f"this run asks for {_processes(wanted)} (nodes x gpus in run.toml), but the launcher started {started}. "
            f"Start it with its train.sh, or {RENDER}"
        )
    node, group = os.environ.get(NODE_VARIABLE, "").lstrip("0"), number("GROUP_RANK", 0)
    if node and node != str(group):
        raise WorldError(
            f"this is machine {node} ({NODE_VARIABLE}), but its launcher calls it machine {group}. "
            f"Unset {NODE_VARIABLE}, where the run trains on one machine"
        )


def choose_backend() -> str:
    """Choose how several processes meet, before accelerate forms the group; a line for the log of rank 0, or "".

    CUDA gets NCCL. Without a GPU, a variable makes accelerate use processors and gloo.

    Raises:
        WorldError: too few GPUs, or a device that cannot train together.
    """
    started = size()
    if started < 2:
        return ""
    import torch

    if os.environ.get(USE_CPU, "").lower() in ("1", "true", "yes"):
        return f"{started} processes train together on processors (gloo)"
    here = local_size()
    if torch.cuda.is_available():
        if (found := torch.cuda.device_count()) < here:
            raise WorldError(
                f"{here} processes run on this machine, but PyTorch finds {found} GPU{'s' * (found != 1)}. Each needs "
                f"one of its own: make more GPUs visible (CUDA_VISIBLE_DEVICES), or {RENDER}"
            )
        # An error in a collective ends the process, as with torchrun.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        return f"{started} processes train together, each on a GPU of its own"
    if torch.backends.mps.is_available():
        raise WorldError(f"{started} processes cannot train together on one of Apple's GPUs (MPS). {ONE_GPU}")
    if hasattr(torch, "accelerator") and torch.accelerator.is_available():
        return ""  # a device that accelerate joins by itself
    os.environ[USE_CPU] = "true"
    return f"PyTorch finds no GPU here: {started} processes train together on processors (gloo)"


def timeout(minutes: float | None) -> timedelta:
    """How long a collective may take. minutes: the trainer's --ddp_timeout; None or 0: the limit `collective_s`."""
    return timedelta(minutes=minutes) if minutes else timedelta(seconds=limits.seconds("collective_s") or 10**6)


def check(found: int) -> None:
    """Compare the group that accelerate formed with the launcher and the run, and the states that its ranks resume.

    found: the processes in it. To be called on every rank before it writes a file.

    Raises:
        WorldError: accelerate joined fewer or more processes than the launcher started.
        RuntimeError: each machine's monitor chose a state, perhaps from an older folder, and they differ. The next
            start of the group finds what has been written meanwhile.
    """
    if found != size():
        raise WorldError(
            f"the launcher started {_processes(size())}, but accelerate joined {found} of them. Each would train the "
            f"whole run alone and overwrite the files of the others. {ONE_GPU}"
        )
    if not os.environ.get(NODE_VARIABLE) or found == 1:
        return
    from torch import distributed

    names: list[str] = [""] * found
    distributed.all_gather_object(names, os.path.basename(os.environ.get("HANGPROOF_RESUME", "")))
    if len(set(names)) > 1:
        each = ", ".join(f"rank {i}: {name or 'the start'}" for i, name in enumerate(names))
        raise RuntimeError(f"the machines do not resume the same state ({each}); all of them have to start again")


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count != 1)}"


def barrier(seconds: float, what: str, ranks: int = 0) -> Deadline:
    """The limit of a barrier. When it expires, the process ends with the phase of each rank of this machine.

    what: which barrier it is, or what this process does. ranks: how many are to arrive (0: all); 1 has no limit.
    """
    ranks = ranks or size()
    text = f"all {ranks} ranks at a barrier (this is rank {rank()}, {what})"
    return Deadline(seconds if ranks > 1 else 0, text, lambda limit_s, at: deadline.expire(limit_s, f"{at}{others()}"))


def others() -> str:
    """What the other ranks of this machine do, for a message: `; rank 1: phase save, step 12, no beat for 95 s`."""
    now_s, folder = time.monotonic(), os.environ.get("HANGPROOF_HEARTBEAT")
    return "".join(
        f"; rank {beat.rank}: phase {beat.phase}, step {beat.step}, no beat for {now_s - beat.beat_s:.0f} s"
        for beat in (heartbeat.read_all(folder) if folder else ())
        if beat.rank != rank()
    )
