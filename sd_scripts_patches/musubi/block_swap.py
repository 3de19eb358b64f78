"""Block swap waits at most `block_swap_timeout_s`, in each of musubi-tuner's two ways to move blocks.

`Offloader` is that of sd-scripts: a pool thread moves the weights and the trainer waits for its future. The other one
streams frozen blocks to the device (`LoRAStreamOffloader`); its copiers wait for a future of their pool thread and for a
stream. `_synchronize_device` waits for the device itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sd_scripts_patches import block_swap, session
from sd_scripts_patches.patch import Patch, Target, uses

MODULE = "musubi_tuner.modules.custom_offloading_utils"


def _copier(original: Callable) -> Callable:
    def wait(self: Any, *key: Any) -> Any:
        block = f"block {key[0]}" if key else "all blocks"
        with session.limit("block_swap_timeout_s", f"{block} to be copied to the device (block swap)"):
            return original(self, *key)

    return wait


def _device(original: Callable) -> Callable:
    def _synchronize_device(device: Any) -> None:
        with session.limit("block_swap_timeout_s", f"device {device} to finish (block swap)"):
            original(device)

    return _synchronize_device


PATCH = Patch(
    name="block_swap",
    why=block_swap.PATCH.why,
    targets=(
        Target(MODULE, "Offloader._wait_blocks_move", params=("self", "block_idx"), make=block_swap._with_deadline),
        Target(MODULE, "_StagedCopier.wait", params=("self", "key"), make=_copier, wait="a block to be copied"),
        Target(MODULE, "_StagedCopier._flush", params=("self",), make=_copier, wait="blocks to be copied"),
        Target(MODULE, "_StagedCopier.sync", params=("self",), make=_copier, wait="the copier's stream"),
        Target(MODULE, "_StagedCopier.reset", params=("self",), make=_copier, wait="the copier's stream"),
        Target(MODULE, "_DirectCopier.sync", params=("self",), make=_copier, wait="the copier's stream"),
        Target(MODULE, "_synchronize_device", params=("device",), make=_device, wait="the device to finish"),
    ),
    relevant=uses("--blocks_to_swap"),
)
