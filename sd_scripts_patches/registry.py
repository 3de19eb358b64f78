"""The patches, in the order in which they are applied where two of them wrap the same name (the later one is outermost)."""

from __future__ import annotations

import functools
import importlib

from sd_scripts_patches import timeouts
from sd_scripts_patches.patch import Patch

NAMES = (
    "hygiene",
    "dataloader",
    "block_swap",
    "npz",
    "images",
    "trackers",
    "sampling",
    "hub",
    "barrier",
    "heartbeat",
    "resume",
    "save",
    "split_mode",
    "exit",
)


@functools.lru_cache(maxsize=1)
def patches() -> tuple[Patch, ...]:
    """All of them, less those left out by name. Raises timeouts.UsageError for a name that does not exist."""
    without = {n for n in timeouts.setting("without").replace(" ", "").split(",") if n}
    unknown = without - set(NAMES)
    if unknown:
        raise timeouts.UsageError(f"no such patch: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    return tuple(importlib.import_module(f"sd_scripts_patches.{name}").PATCH for name in NAMES if name not in without)
