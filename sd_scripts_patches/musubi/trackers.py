"""Experiment trackers run beside training, as for sd-scripts. The trainer starts them through accelerate."""

from __future__ import annotations

from sd_scripts_patches import trackers
from sd_scripts_patches.musubi import ACCELERATOR_SETUP
from sd_scripts_patches.patch import Patch, Target

PATCH = Patch(
    name="trackers",
    why=trackers.PATCH.why,
    targets=(
        Target(
            ACCELERATOR_SETUP,
            "prepare_accelerator",
            params=("args",),
            make=trackers._without_login,
            wait="the login to wandb",
        ),
        Target(
            "accelerate.accelerator",
            "Accelerator.init_trackers",
            params=("self", "project_name"),
            make=trackers._start_within_limit,
            wait="a tracker to start, to log, to finish",
        ),
    ),
)
