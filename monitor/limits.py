"""The table of durations (`limits.toml`) as typed values; a file that `HANGPROOF_LIMITS` names may replace any of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path

import tomllib


class LimitsError(ValueError):
    """A limits file that cannot be used."""


@dataclass(frozen=True)
class Phase:
    """Least and longest time without progress that a phase may be given, seconds."""

    floor: float
    ceiling: float


@dataclass(frozen=True)
class Watching:
    few: int
    well_known: int
    young_floor: float
    median_times: float
    longest_times: float
    log_silence: float
    stopped: float
    between_steps: float
    exit: float
    launcher: float
    slow_times: float
    poll_min: float
    poll_max: float
    tree: float
    evidence_pause: float


@dataclass(frozen=True)
class Ending:
    grace: float
    stop_grace: float
    kill_wait: float
    gpu_memory: float
    unkillable: float
    stop_save: float
    preempt_save: float
    preempt_grace: float
    preempt_kill: float


@dataclass(frozen=True)
class Restart:
    without_progress: int
    in_all: int
    backoff_first: float
    backoff_last: float
    refund: float
    disk_wait: float


@dataclass(frozen=True)
class Check:
    verify: float
    render: float
    stack_dump: float
    py_spy: float
    log_tail: int


@dataclass(frozen=True)
class Limits:
    phases: dict[str, Phase]
    watch: Watching
    end: Ending
    restart: Restart
    check: Check


def load(override: str | os.PathLike | None = None) -> Limits:
    """The table, with the values of `override` (default: `$HANGPROOF_LIMITS`) in place of ours.

    Raises:
        LimitsError: the file is not there, does not parse, or names something that does not exist.
    """
    ours = _from(tomllib.loads(Path(__file__).with_name("limits.toml").read_text(encoding="utf-8")))
    path = override or os.environ.get("HANGPROOF_LIMITS")
    if not path:
        return ours
    try:
        theirs = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LimitsError(
            f"{path}: cannot read these limits: {error}; fix the file or unset HANGPROOF_LIMITS"
        ) from error
    return _merged(ours, theirs, str(path))


def _from(table: dict) -> Limits:
    return Limits(
        phases={name: Phase(**values) for name, values in table["phases"].items()},
        watch=Watching(**table["watch"]),
        end=Ending(**table["end"]),
        restart=Restart(**table["restart"]),
        check=Check(**table["check"]),
    )


def _merged(limits: Limits, table: dict, path: str) -> Limits:
    phases = dict(limits.phases)
    for name, values in table.pop("phases", {}).items():
        if name not in phases:
            raise LimitsError(f"{path}: no phase {name!r}; there are: {', '.join(phases)}")
        phases[name] = _replaced(phases[name], values, path, f"phases.{name}")
    sections = {}
    for name, values in table.items():
        if name not in {f.name for f in fields(limits)}:
            raise LimitsError(f"{path}: no section [{name}]; there are: phases, watch, end, restart, check")
        sections[name] = _replaced(getattr(limits, name), values, path, name)
    return replace(limits, phases=phases, **sections)


def _replaced(section, values: dict, path: str, where: str):
    known = {f.name for f in fields(section)}
    for key, value in values.items():
        if key not in known:
            raise LimitsError(f"{path}: [{where}] has no {key!r}; there are: {', '.join(sorted(known))}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise LimitsError(f"{path}: [{where}] {key} = {value!r}: give a number of seconds, 0 or more")
    return replace(section, **values)
