"""Several processes train one LoRA with musubi-tuner: as in sd_scripts_patches/world.py.

Its data sets shuffle before the first batch of an epoch is read, and draw nothing while they read, so that the noise and
the order of an epoch are all that has to follow from the number of the batch. With --num_timestep_buckets each rank takes
its timesteps from a pool of its own, so that N processes are not one process there.
"""

from __future__ import annotations

from sd_scripts_patches import world
from sd_scripts_patches.musubi import BASE
from sd_scripts_patches.patch import Patch, Target

PATCH = Patch(
    name="world",
    why=world.PATCH.why,
    targets=(
        Target(BASE, "NetworkTrainer.train", params=("self", "args"), make=world._check_first),
        world.JOIN,
        world.PREPARE,
        world.SCHEDULE,
        Target(
            BASE,
            "NetworkTrainer.get_lr_scheduler",
            params=("self", "args", "optimizer", "num_processes"),
            make=world.for_one_process,
        ),
    ),
)
