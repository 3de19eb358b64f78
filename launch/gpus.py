"""Which rented GPUs can train a run: those with the memory of its tier, and with what the estimate says that it needs."""

from typing import TYPE_CHECKING

import presets
from launch.common import LaunchError
from presets.estimate import estimate

if TYPE_CHECKING:
    from runs.spec import RunSpec

MOST = 6  # GPUs that are named: more are much larger and more expensive than the run needs


# GPUs that can be rented, the usually cheaper ones first: memory in GB as on the box, the names at SkyPilot (also for Vast.ai) and at
# RunPod, "" where it has none. All compute bf16, which the presets train with (Turing and Volta, such as T4 and V100, do not).
# Sources: sky/provision/runpod/utils.py and sky/catalog of SkyPilot 0.14.1; docs.runpod.io/references/gpu-types.
TABLE = (
    (16, "RTX2000-Ada", "NVIDIA RTX 2000 Ada Generation"),
    (16, "RTXA4000", "NVIDIA RTX A4000"),
    (20, "RTX4000-Ada", "NVIDIA RTX 4000 Ada Generation"),
    (24, "RTX3090", "NVIDIA GeForce RTX 3090"),
    (24, "RTXA5000", "NVIDIA RTX A5000"),
    (24, "L4", "NVIDIA L4"),
    (24, "A10G", ""),
    (24, "RTX4090", "NVIDIA GeForce RTX 4090"),
    (32, "RTX5090", "NVIDIA GeForce RTX 5090"),
    (48, "A40", "NVIDIA A40"),
    (48, "RTXA6000", "NVIDIA RTX A6000"),
    (48, "L40S", "NVIDIA L40S"),
    (80, "A100-80GB", "NVIDIA A100 80GB PCIe"),
    (80, "H100", "NVIDIA H100 PCIe"),
)
PLACES = {"skypilot": 1, "runpod": 2}  # the column of TABLE


def needed_gb(spec: "RunSpec") -> float:
    """The GPU memory that a run needs in GB: its tier's, or more where the estimate is higher; 0 for a model that trains on a CPU."""
    if presets.models()[spec.model]["generated"]:
        return 0.0
    return max(float(presets.tiers()[spec.tier]["vram_gb"]), float(estimate(spec.model_dump())["peak_gb"]))


def names(spec: "RunSpec", place: str, chosen: str = "") -> list[str]:
    """The names at `place` (skypilot or runpod) of the GPUs that can train a run, the cheapest first; [] for a CPU.

    Args:
        chosen: the user's own GPU; it is taken as it is, because places rent more kinds than the table has.

    Raises:
        LaunchError: no GPU of the table has the memory.
    """
    if chosen:
        return [chosen]
    needed = needed_gb(spec)
    if not needed:
        return []
    column = PLACES[place]
    found = [str(row[column]) for row in TABLE if row[column] and row[0] >= needed]
    if not found:
        raise LaunchError(
            f"the run needs {needed:.1f} GB of GPU memory, and no GPU of launch/gpus.py has that; name one with --gpu, "
            "or lower the resolution, batch size or rank"
        )
    return found[:MOST]
