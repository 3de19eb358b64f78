"""A barrier that one rank never reaches ends the process with a message that names the barrier, the rank and the phase.

`wait_for_everyone` is where the other GPUs wait when one rank hangs. NCCL's own timeout, when it is set at all, fires
in the middle of a long caching phase on rank 0. This limit is generous because the other ranks wait there while rank 0
caches; the monitor sees the phase of each rank and decides sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from guards import limits, world
from sd_scripts_patches import session
from sd_scripts_patches.patch import Patch, around, function

MODULE = "accelerate.accelerator"


@around
def _with_deadline(original: Callable, self: Any) -> None:
    """Put a deadline around the barrier. A run with one process has none."""
    if self.num_processes < 2:
        return original(self)
    what = f"phase {session.heartbeat().current_phase}"
    with world.barrier(limits.seconds("barrier_timeout_s"), what, self.num_processes):
        return original(self)


PATCH = Patch(
    name="barrier",
    why="when one rank is late or dead, the others wait at a barrier for ever",
    targets=(function(MODULE, "Accelerator.wait_for_everyone(self)", _with_deadline),),
)
