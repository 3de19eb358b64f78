"""Several processes train one LoRA: the group is the one that was asked for, every wait in it has an end, and the
learning rate follows the steps.

guards/world.py says why a smaller group is refused, and what ends the waits. accelerate's own timeout reaches only the
group that the trainer configures, which sd-scripts does where one machine has several GPUs; here every group has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

from guards import crash, limits, world
from sd_scripts_patches import batch_seeds, exit as exit_patch, heartbeat as beats, session
from sd_scripts_patches.musubi import BASE
from sd_scripts_patches.patch import Patch, Target, around, function

TRAINER = "train_network"
UTIL = "library.train_util"
ACCELERATOR = "accelerate.accelerator"

_minutes: float | None = None  # --ddp_timeout of this run


@around
def _check_first(original: Callable, self: Any, args: Any) -> Any:
    """Refuse a world that is not the one asked for, before the trainer reads or writes anything."""
    global _minutes
    _minutes = getattr(args, "ddp_timeout", None)
    try:
        world.check_launcher()
        chosen = world.choose_backend()
    except world.WorldError as problem:
        _refuse(problem)
    if chosen and world.rank() == 0:
        session.log(chosen)
    return original(self, args)


def _refuse(problem: world.WorldError) -> NoReturn:
    session.log(f"{problem}. Nothing was trained.")
    exit_patch.exit_process(crash.EXIT_FAILED, "failed", str(problem))


@around
def _join(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """The group of this run's processes: it forms within a limit, its collectives have a timeout, it is complete."""
    if world.size() < 2:
        original(self, *args, **kwargs)
        return
    from accelerate import InitProcessGroupKwargs

    handlers = list(kwargs.get("kwargs_handlers") or ())
    found = next((one for one in handlers if isinstance(one, InitProcessGroupKwargs)), None)
    if found is None:
        handlers.append(InitProcessGroupKwargs(timeout=world.timeout(_minutes)))
    elif found.timeout is None:
        found.timeout = world.timeout(_minutes)
    with world.barrier(limits.seconds("group_s"), "joining the group"):
        original(self, *args, **{**kwargs, "kwargs_handlers": handlers})
    try:
        world.check(self.num_processes)
    except world.WorldError as problem:
        _refuse(problem)


@around
def _one_step_each(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Step the learning rate once for each optimizer step, whatever the number of processes."""
    original(self, *args, **kwargs)
    self.split_batches = self.split_batches or world.size() > 1


@around
def for_one_process(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Make the schedule of the learning rate for the steps of the run, not for N times as many.

    kohya's trainers stretch it by N, because accelerate steps it N times for each step. They do not stretch
    --lr_warmup_steps and --lr_decay_steps, so a warm-up of 100 steps ends after 50 with two GPUs.
    """
    if "num_processes" in kwargs:
        return original(*args, **{**kwargs, "num_processes": 1})
    return original(*args[:-1], 1, **kwargs)


@around
def _frozen_alone(
    original: Callable,
    self: Any,
    model: Any,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
    **more: Any,
) -> Any:
    """Do not wrap a frozen model, which has no gradients to exchange. accelerate asks for that on GPUs only, and on
    processors DistributedDataParallel refuses the base model."""
    frozen = world.size() > 1 and not any(parameter.requires_grad for parameter in model.parameters())
    return original(self, model, device_placement, evaluation_mode or frozen, **more)


@around
def _read_by_number(original: Callable, self: Any, index: int) -> Any:
    """Read a batch as its number says: in the order of this epoch, with flips and shuffled tags of its own."""
    if batch_seeds.by_batch():
        epoch = beats._epoch
        if epoch is not None and epoch.value > 0:
            self.set_current_epoch(epoch.value)
        batch_seeds.seed_all(batch_seeds.seed_for(self.seed, "read", self.current_epoch, index))
    return original(self, index)


_JOIN = "all processes to join their group"


def _targets(trainer: str) -> tuple[Target, ...]:
    """trainer: the module of the training."""
    return (
        function(trainer, "NetworkTrainer.train(self, args)", _check_first),
        function(ACCELERATOR, "Accelerator.__init__(self)", _join, wait=_JOIN),
        function(
            ACCELERATOR, "Accelerator.prepare_model(self, model, device_placement, evaluation_mode)", _frozen_alone
        ),
        function("accelerate.scheduler", "AcceleratedScheduler.__init__(self, scheduler)", _one_step_each),
    )


PATCH = Patch(
    name="world",
    why="processes that do not find each other train the whole run each, and overwrite each other's files",
    targets=(
        *_targets(TRAINER),
        function(UTIL, "get_scheduler_fix(args, optimizer, num_processes)", for_one_process),
        function(UTIL, "BaseDataset.__getitem__(self, index)", _read_by_number),
    ),
)
MUSUBI = dataclasses.replace(
    PATCH,
    targets=(
        *_targets(BASE),
        function(BASE, "NetworkTrainer.get_lr_scheduler(self, args, optimizer, num_processes)", for_one_process),
    ),
)
"""musubi-tuner's data sets shuffle before the first batch of an epoch is read, and draw nothing while they read, so that the noise
and the order of an epoch are all that has to follow from the number of the batch. With --num_timestep_buckets each rank takes its
timesteps from a pool of its own, so that N processes are not one process there."""
