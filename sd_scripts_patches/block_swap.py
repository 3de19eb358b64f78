"""Block swap waits at most `block_swap_timeout_s` for a block.

`future.result()` has no timeout there: the pool thread that moves the weights waits on a CUDA stream, and when that
stalls, the trainer waits for the thread at 0 % GPU without a message (FluxGym's best-known hang). All waits go through
`_wait_blocks_move`: `wait_for_block`, the backward hooks, `set_forward_only` and
`prepare_block_devices_before_forward`, so one wrapper covers them. An exception would not help: the interpreter joins
the stuck thread at exit. The deadline therefore ends the process.

musubi-tuner has a second way to move blocks, which streams frozen ones to the device (`LoRAStreamOffloader`); its
copiers wait for a future of their pool thread and for a stream. `_synchronize_device` waits for the device itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sd_scripts_patches import session
from sd_scripts_patches.patch import Patch, around, function, uses

MODULE = "library.custom_offloading_utils"
MUSUBI_MODULE = "musubi_tuner.modules.custom_offloading_utils"


@around
def _with_deadline(original: Callable, self: Any, block_idx: int) -> None:
    """Put a deadline around every wait for a block."""
    if block_idx not in self.futures:
        return original(self, block_idx)
    what = f"block {block_idx} of {self.num_blocks} to be swapped in (block swap, {self.blocks_to_swap} blocks)"
    with session.limit("block_swap_timeout_s", what):
        return original(self, block_idx)


@around
def _copier(original: Callable, self: Any, *key: Any) -> Any:
    block = f"block {key[0]}" if key else "all blocks"
    with session.limit("block_swap_timeout_s", f"{block} to be copied to the device (block swap)"):
        return original(self, *key)


@around
def _device(original: Callable, device: Any) -> None:
    with session.limit("block_swap_timeout_s", f"device {device} to finish (block swap)"):
        original(device)


PATCH = Patch(
    name="block_swap",
    why="a swap thread that is stuck on a CUDA stream blocks training for ever",
    targets=(function(MODULE, "Offloader._wait_blocks_move(self, block_idx)", _with_deadline),),
    relevant=uses("--blocks_to_swap"),
)
MUSUBI = dataclasses.replace(
    PATCH,
    targets=(
        dataclasses.replace(PATCH.targets[0], module=MUSUBI_MODULE),
        function(MUSUBI_MODULE, "_StagedCopier.wait(self, key)", _copier, wait="a block to be copied"),
        function(MUSUBI_MODULE, "_StagedCopier._flush(self)", _copier, wait="blocks to be copied"),
        function(MUSUBI_MODULE, "_StagedCopier.sync(self)", _copier, wait="the copier's stream"),
        function(MUSUBI_MODULE, "_StagedCopier.reset(self)", _copier, wait="the copier's stream"),
        function(MUSUBI_MODULE, "_DirectCopier.sync(self)", _copier, wait="the copier's stream"),
        function(MUSUBI_MODULE, "_synchronize_device(device)", _device, wait="the device to finish"),
    ),
)
