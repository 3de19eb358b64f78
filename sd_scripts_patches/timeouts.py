"""Every deadline of the patches, in one table: what is waited for, how long, and how to change it.

Each is set by a flag of the launcher (`--hangproof_npz_timeout_s=60`, taken out before the script sees its
arguments) or by the environment (`HANGPROOF_NPZ_TIMEOUT_S=60`); the flag wins. A flag is written into the
environment, because that is what spawned loader workers inherit. 0 means: no deadline.
"""

from __future__ import annotations

import os

TABLE: dict[str, tuple[float, str]] = {
    "dataloader_timeout_s": (60, "one batch from the loader's workers"),
    "dataloader_first_batch_s": (300, "the first batch of each iterator, and every batch where there are no workers"),
    "block_swap_timeout_s": (30, "one block of the model to arrive (block swap)"),
    "npz_timeout_s": (30, "one read of a cache file (.npz)"),
    "image_timeout_s": (30, "one image file to be read"),
    "tracker_timeout_s": (60, "experiment trackers (wandb, tensorboard…) to start, to finish"),
    "sample_budget_s": (300, "one sample image; checked between denoising steps, twice this ends the process"),
    "hub_timeout_s": (300, "one attempt at a download from the model hub"),
    "upload_timeout_s": (1800, "one attempt at an upload to the model hub"),
    "upload_exit_s": (60, "uploads still under way when training has finished"),
    "barrier_timeout_s": (1800, "all ranks to arrive at a barrier"),
    "git_timeout_s": (10, "git, asked for the revision of sd-scripts"),
    "exit_grace_s": (15, "threads, workers and exit handlers once the script has ended"),
}
SETTINGS: dict[str, tuple[str, str]] = {
    "empty_cache_steps": ("0", "empty the GPU's cache every N steps; 0: never"),
    "progress_line_s": ("60", "a line in the log that says where training is, each so many seconds; 0: none"),
    "skip_images": ("10", "different images that cannot be read and are passed over; 0: the first one ends the run"),
    "without": ("", "names of patches to leave out, comma separated; for finding faults"),
}
COUNTS = ("empty_cache_steps", "skip_images", "progress_line_s")
"""The settings that are numbers."""
PREFIX = "--hangproof_"


class UsageError(ValueError):
    """A flag or an environment variable that does not exist or cannot be read; the message says which and what is allowed."""


def seconds(name: str) -> float:
    """The deadline `name` in seconds; 0 when it is switched off. Raises UsageError where the environment holds no number."""
    value = os.environ.get(variable(name))
    if value is None or value == "":
        return TABLE[name][0]
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UsageError(f"{variable(name)}={value!r}: expected seconds, 0 for no deadline")
    return number


def setting(name: str) -> str:
    """A setting that is no deadline, as text."""
    return os.environ.get(variable(name)) or SETTINGS[name][0]


def count(name: str) -> int:
    """A setting that is a number of things. Raises UsageError where it is none."""
    text = setting(name)
    if not text.isdecimal():
        raise UsageError(f"{variable(name)}={text!r}: expected a whole number, 0 for none")
    return int(text)


def variable(name: str) -> str:
    """The environment variable of a timeout or setting."""
    return f"HANGPROOF_{name.upper()}"


def listing() -> str:
    """All flags with their defaults, one a line, for people."""
    rows = [(name, f"{default:g}", what) for name, (default, what) in TABLE.items()]
    rows += [(name, default or "none", what) for name, (default, what) in SETTINGS.items()]
    return "".join(f"  {PREFIX}{name:<26} {default:>5}  {what}\n" for name, default, what in rows)


def take_flags(arguments: list[str]) -> list[str]:
    """`arguments` without our flags, which are put into the environment. Raises UsageError for an unknown one."""
    rest, waiting = [], iter(arguments)
    for argument in waiting:
        if not argument.startswith(PREFIX):
            rest.append(argument)
            continue
        name, given, value = argument[len(PREFIX) :].replace("-", "_").partition("=")
        if name not in TABLE and name not in SETTINGS:
            known = ", ".join(PREFIX + n for n in (*TABLE, *SETTINGS))
            raise UsageError(f"{argument}: no such flag; there are {known}")
        if not given:
            value = next(waiting, "")
        os.environ[variable(name)] = value
    for name in TABLE:
        seconds(name)
    for name in COUNTS:
        count(name)
    return rest
