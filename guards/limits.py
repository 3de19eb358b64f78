"""Every time limit inside the training process, in one table (limits.toml), with those of the monitor around it.

Why one table: two limits in two programs contradict each other sooner or later. The monitor once gave a finished
process 15 s to exit, while the process took 60 s for its uploads and 15 s more for its threads. Now each row names the
keys of `monitor/config.toml` that enclose it, and the monitor raises these (monitor/config.py):
outer limit >= inner limit + grace. Which limits a training has set, its heartbeat says (guards/heartbeat.py).

Which key encloses a limit follows from what happens when the limit fires. Where the run continues afterwards (an upload
is given up, a cache file is written again), a monitor that acts first kills a healthy run, so the *floor* of the phase
encloses it. Where the process is killed, the *ceiling* encloses it: the budget that the monitor learns is a second,
faster detector, and both come to the same result.

Rows under `[user]` can be changed by a flag of the launcher (`--hangproof_npz_timeout_s=60`) or by the environment
(`HANGPROOF_NPZ_TIMEOUT_S=60`); 0 means no limit. The other rows are constants.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Limit:
    """One limit. All times in seconds."""

    default_s: float
    what: str  # what the process waits for
    grace_s: float = 0.0  # from the moment the limit fires until the wait, or the process, is gone
    outer: tuple[str, ...] = ()  # keys of monitor/config.toml that must be at least limit + grace
    user: bool = True  # users can set it; 0 means no limit


TABLE: dict[str, Limit] = {}
"""Name of the limit to the limit. The order is the order of the help text."""
for _line in FILE.read_text(encoding="utf-8").splitlines():
    if _line.startswith("["):
        _user = _line == "[user]"
    elif _line and not _line.startswith("#"):
        _name, _, _row = _line.partition(" = ")
        _default_s, _grace_s, _what, *_outer = json.loads(_row)
        TABLE[_name] = Limit(float(_default_s), _what, float(_grace_s), tuple(_outer), _user)


class LimitError(ValueError):
    """An environment variable that sets a limit and holds no number of seconds; the message says which."""


def variable(name: str) -> str:
    """The environment variable that sets the limit `name`."""
    return f"HANGPROOF_{name.upper()}"


def seconds(name: str, environ: Mapping[str, str] | None = None) -> float:
    """The limit `name` in seconds; 0 where a user switched it off.

    Raises LimitError where its environment variable is not a number >= 0, KeyError for an unknown name.
    """
    limit = TABLE[name]
    text = (os.environ if environ is None else environ).get(variable(name), "") if limit.user else ""
    if not text:
        return limit.default_s
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise LimitError(f"{variable(name)}={text!r}: expected seconds, 0 for no limit")
    return number
