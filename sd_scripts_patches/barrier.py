"""A barrier that one rank never reaches ends with that rank's peers saying so, not with all of them waiting.

`wait_for_everyone` is where a run with several GPUs stands when one of them hangs (NCCL's own limit, where it is set at all,
gives up in the middle of a long caching phase on rank 0). The limit is generous, because the other ranks wait
there while rank 0 caches; the monitor sees each rank's phase and judges sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from sd_scripts_patches import session
from sd_scripts_patches.patch import Patch, Target, wrap

MODULE = "accelerate.accelerator"


def apply(module: ModuleType) -> None:
    """A deadline around the barrier; nothing where there is one process."""

    def make(original: Callable) -> Callable:
        def wait_for_everyone(self):
            if self.num_processes < 2:
                return original(self)
            phase = session.heartbeat().current_phase
            what = f"all {self.num_processes} ranks at a barrier (this is rank {self.process_index}, phase {phase})"
            with session.within("barrier_timeout_s", what):
                return original(self)

        return wait_for_everyone

    wrap(module, "Accelerator.wait_for_everyone", make)


PATCH = Patch(
    name="barrier",
    why="one rank is late or dead: the others wait in a barrier for ever",
    targets=(Target(MODULE, "Accelerator.wait_for_everyone", params=("self",)),),
    apply={MODULE: apply},
)
