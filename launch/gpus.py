"""Which rented GPUs can train a run: those with the memory of its tier, and with what the estimate says that it needs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomllib

import presets
from launch.common import LaunchError
from presets.estimate import estimate

if TYPE_CHECKING:
    from runs.spec import RunSpec

MOST = 6  # GPUs that are named: more are much larger and more expensive than the run needs


def table() -> list[dict[str, Any]]:
    """The GPUs that can be rented, the usually cheaper ones first: {"gb", and the names at "skypilot" and "runpod"}."""
    return list(tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["gpu"])


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
    found = [row[place] for row in table() if place in row and row["gb"] >= needed]
    if not found:
        raise LaunchError(
            f"the run needs {needed:.1f} GB of GPU memory, and no GPU of launch/gpus.toml has that; name one with --gpu, "
            "or lower the resolution, batch size or rank"
        )
    return found[:MOST]
