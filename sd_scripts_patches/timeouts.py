"""The time limits and settings of the patches, and the flags that change them.

The limits and their defaults are in guards/limits.toml, one table for the training process and the monitor. Each is set
by a flag of the launcher (`--hangproof_npz_timeout_s=60`, removed before the script sees its arguments) or in the
environment (`HANGPROOF_NPZ_TIMEOUT_S=60`); the flag wins. A flag is written into the environment, because that is what
spawned loader workers inherit. 0 means no limit.
"""

from __future__ import annotations

import os

from guards import limits

SETTINGS: dict[str, tuple[str, str]] = {
    "batch_seeds": ("", "1: noise and order follow from the number of the batch, as always with several processes"),
    "progress_line_s": ("60", "seconds between two lines in the log that show the progress; 0: none"),
    "skip_images": ("10", "number of unreadable images to replace by others; 0: the first one ends the run"),
    "strict": ("", "1: refuse to start when any target is not guarded, also one that this run does not use"),
    "without": ("", "names of patches to leave out, separated by commas; for debugging"),
}
COUNTS = ("skip_images", "progress_line_s")
"""The settings that are whole numbers."""
PREFIX = "--hangproof_"


class UsageError(ValueError):
    """A flag or environment variable that is unknown or unreadable; the message says which and what is allowed."""


def names() -> list[str]:
    """Return the names of the limits that a user can set, in the order of the help text."""
    return [name for name, limit in limits.TABLE.items() if limit.user]


def setting(name: str) -> str:
    """Return a setting as text."""
    return os.environ.get(limits.variable(name)) or SETTINGS[name][0]


def count(name: str) -> int:
    """Return a setting that is a whole number. Raises UsageError when it is not one."""
    text = setting(name)
    if not text.isdecimal():
        raise UsageError(f"{limits.variable(name)}={text!r}: expected a whole number, 0 for none")
    return int(text)


def listing() -> str:
    """Return all flags with their defaults, one per line, for the help text."""
    rows = [(name, f"{limits.TABLE[name].default_s:g}", limits.TABLE[name].what) for name in names()]
    rows += [(name, default or "none", what) for name, (default, what) in SETTINGS.items()]
    return "".join(f"  {PREFIX}{name:<26} {default:>5}  {what}\n" for name, default, what in rows)


def take_flags(arguments: list[str]) -> list[str]:
    """Return `arguments` without our flags, which are written into the environment. Raises UsageError."""
    rest, remaining = [], iter(arguments)
    known = [*names(), *SETTINGS]
    for argument in remaining:
        if not argument.startswith(PREFIX):
            rest.append(argument)
            continue
        name, equals, value = argument[len(PREFIX) :].replace("-", "_").partition("=")
        if name not in known:
            raise UsageError(f"unknown flag {argument}; the flags are {', '.join(PREFIX + n for n in known)}")
        if not equals:
            value = next(remaining, "")
        os.environ[limits.variable(name)] = value
    try:
        for name in names():
            limits.seconds(name)
    except limits.LimitError as error:
        raise UsageError(str(error)) from error
    for name in COUNTS:
        count(name)
    return rest
