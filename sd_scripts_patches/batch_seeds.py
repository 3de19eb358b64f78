"""N processes train as one with N times the accumulation: random numbers follow from the number of the batch.

With N processes, kohya's trainers train otherwise than with one and N times the accumulation, in four ways (measured on
v0.10.1, v0.11.1 and musubi-tuner v0.3.4 with tiny weights):

- Every rank seeds its generators alike. So in each step all ranks add the same noise, at the same timestep, to different
  images: N images teach one noise level instead of N.
- The order of an epoch comes from a generator that accelerate makes for several processes only.
- Where the batches of an epoch do not divide by N, accelerate repeats its first ones, and they are learned twice.
- sd-scripts shuffles its buckets after the first batch that a process has read in an epoch, so N processes train N batches
  in the order of the epoch before, and leave out or repeat images.

So with several processes a repeated batch has no part in its step, and the noise, the order and what is drawn while a
batch is read follow from the seed of the run, the epoch, and the number of the batch in it, over all processes. One
process keeps kohya's own stream of random numbers, unless the setting `batch_seeds` is 1: then it trains as N processes
do, which is how both are compared, and how a run continues on one GPU.
"""

from __future__ import annotations

import hashlib
import os
import random
from typing import Any

from guards import world
from sd_scripts_patches import data_order, timeouts


def by_batch() -> bool:
    """Do random numbers follow from the number of the batch in this run?"""
    return world.size() > 1 or timeouts.setting("batch_seeds") == "1"


def seed_for(*parts: object) -> int:
    """Return a seed of 32 bits (numpy takes no more) that depends only on the text of `parts`."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "little")


def of_all_ranks() -> int | None:
    """Return the seed of several processes without --seed, of which each would draw its own, with its own order."""
    return seed_for(os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) if world.size() > 1 else None


def seed_all(seed: int) -> None:
    """Seed the generators of python, numpy and torch, those of the devices included."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


_batches = 0  # of an epoch, over all processes; 0 where random numbers do not follow from them
_repeated = False


def repeated() -> bool:
    """Is this batch there only to give each process as many? Another process trains it in this epoch."""
    return _repeated


def begin_training(loader: Any) -> None:
    """Before the first epoch: all ranks, and one process, draw the order of an epoch from the same generator."""
    global _batches
    owner = data_order.innermost_batch_sampler(loader.batch_sampler)
    sampler, _batches = owner.sampler, len(owner) if by_batch() else 0
    if _batches and getattr(sampler, "generator", None) is not None:
        sampler.generator = None


def begin_epoch(seed: int, epoch: int) -> None:
    """Before the loader's iterator of epoch `epoch` (its index) is made."""
    if by_batch():
        seed_all(seed_for(seed, "order", epoch))


def begin_batch(seed: int, epoch: int, batch: int, accelerator: Any) -> None:
    """Before batch `batch` (its index among those of this process) of an epoch is trained."""
    global _repeated
    if _batches:
        number = batch * accelerator.num_processes + accelerator.process_index
        _repeated = number >= _batches
        seed_all(seed_for(seed, "noise", epoch, number))
