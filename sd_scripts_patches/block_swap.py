"""Block swap waits at most 30 s for a block.

`future.result()` there has no end: the pool thread that moves the weights waits on a CUDA stream, and when that
stalls the trainer waits for the thread, at 0 % GPU and without a word (FluxGym's best-known hang). All waits go
through `_wait_blocks_move`: `wait_for_block`, the backward hooks, `set_forward_only` and
`prepare_block_devices_before_forward`; one wrapper covers them. An error raised here would not do: the interpreter
joins the stuck thread at exit. So the deadline ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from sd_scripts_patches import session
from sd_scripts_patches.patch import Patch, Target, wrap

MODULE = "library.custom_offloading_utils"


def apply(module: ModuleType) -> None:
    """Put a deadline around every wait for a block."""

    def make(original: Callable) -> Callable:
        def _wait_blocks_move(self, block_idx):
            if block_idx not in self.futures:
                return original(self, block_idx)
            what = f"block {block_idx} of {self.num_blocks} to be swapped in (block swap, {self.blocks_to_swap} blocks)"
            with session.within("block_swap_timeout_s", what):
                return original(self, block_idx)

        return _wait_blocks_move

    wrap(module, "Offloader._wait_blocks_move", make)


PATCH = Patch(
    name="block_swap",
    why="a swap thread stuck on a CUDA stream blocks training for ever",
    targets=(Target(MODULE, "Offloader._wait_blocks_move", params=("self", "block_idx")),),
    apply={MODULE: apply},
)
