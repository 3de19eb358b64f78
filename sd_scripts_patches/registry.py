"""The patches in the order in which they are applied. When two wrap the same name, the later one is the outer one."""

from __future__ import annotations

import dataclasses
import functools
import importlib

from sd_scripts_patches import compatibility, locate, timeouts
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
    "float8",
    "validation",
    "exit",
    "world",
)

MUSUBI_LACKS = ("images", "split_mode", "float8", "validation")
MUSUBI_NAMES = tuple("caches" if name == "npz" else name for name in NAMES if name not in MUSUBI_LACKS)
"""The patches of musubi-tuner."""
OWN = ("caches", "heartbeat", "resume")
"""Those of musubi-tuner that are in the folder `musubi`. Of the others, MUSUBI says where its functions are; where there is no MUSUBI,
the patch is sd-scripts' own, without its modules."""


@functools.lru_cache(maxsize=2)
def patches(trainer: str = compatibility.SD_SCRIPTS) -> tuple[Patch, ...]:
    """Return a trainer's patches except those that the setting `without` names.

    Raises timeouts.UsageError for an unknown name.
    """
    names = MUSUBI_NAMES if trainer == compatibility.MUSUBI else NAMES
    without = {n for n in timeouts.setting("without").replace(" ", "").split(",") if n}
    unknown = without - {*NAMES, *MUSUBI_NAMES}
    if unknown:
        raise timeouts.UsageError(f"unknown patch: {', '.join(sorted(unknown))}; the patches are {', '.join(names)}")
    return tuple(_patch(trainer, name) for name in names if name not in without)


def _patch(trainer: str, name: str) -> Patch:
    own = trainer == compatibility.MUSUBI and name in OWN
    module = importlib.import_module(f"sd_scripts_patches.{'musubi.' if own else ''}{name}")
    patch: Patch = module.PATCH
    if own or trainer != compatibility.MUSUBI:
        return patch
    installed = tuple(t for t in patch.targets if not locate.belongs_to_checkout(t.module, None))
    return getattr(module, "MUSUBI", dataclasses.replace(patch, targets=installed))
