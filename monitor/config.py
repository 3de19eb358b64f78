"""The monitor's limits: `config.toml` as typed values.

Decision: one table with a unit in every key, instead of constants beside the code that uses them. A file named by
`$HANGPROOF_LIMITS` replaces any value. Each value is then raised to the minimum that the guards inside the training need
(`guards.limits.minimums`), so that the monitor never kills a process before its own deadline can end it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from guards import limits

_DEFAULTS = Path(__file__).with_name("config.toml")
_UNITS: dict[str, tuple[tuple[type[float], ...], str]] = {
    "s": ((int, float), "a number of seconds, 0 or more"),
    "count": ((int,), "an integer, 0 or more"),
    "bytes": ((int,), "a number of bytes, 0 or more"),
}


class ConfigError(ValueError):
    """A configuration file that cannot be used. The message names the file, the key and the fix."""


@dataclass(frozen=True)
class Phase:
    floor_s: float
    ceiling_s: float


@dataclass(frozen=True)
class Watching:
    min_sample_count: int
    warm_sample_count: int
    warmup_floor_s: float
    log_silence_s: float
    stopped_s: float
    between_steps_s: float
    exit_s: float
    launcher_s: float
    script_idle_s: float
    poll_min_s: float
    poll_max_s: float
    tree_s: float
    evidence_pause_s: float
    fault_s: float
    silent_s: float


@dataclass(frozen=True)
class Ending:
    grace_s: float
    stop_grace_s: float
    kill_wait_s: float
    gpu_memory_s: float
    unkillable_s: float
    stop_save_s: float
    preempt_save_s: float
    preempt_grace_s: float
    preempt_kill_s: float
    preempt_total_s: float


@dataclass(frozen=True)
class Restart:
    without_progress_count: int
    in_all_count: int
    backoff_first_s: float
    backoff_last_s: float
    refund_s: float
    start_s: float
    disk_wait_s: float
    snapshots_bytes: int


@dataclass(frozen=True)
class Check:
    verify_s: float
    render_s: float
    stack_dump_s: float
    py_spy_s: float
    log_tail_bytes: int


@dataclass(frozen=True)
class Store:
    lease_s: float
    connect_s: float
    copy_s: float
    status_s: float
    flush_s: float
    release_s: float
    restart_s: float
    bandwidth_bytes: int
    extra_saves_count: int


@dataclass(frozen=True)
class Standby:
    tries_count: int
    steps_count: int
    start_s: float
    gate_s: float
    reserve_bytes: int


@dataclass(frozen=True)
class Slow:
    window_s: float


@dataclass(frozen=True)
class Config:
    phases: dict[str, Phase]
    watch: Watching
    end: Ending
    restart: Restart
    check: Check
    store: Store
    standby: Standby
    slow: Slow


def load(override: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """`config.toml`, replaced by the values of `override` (default: `$HANGPROOF_LIMITS`), raised to the guards' minimums.

    environ: the variables of the training process (default: this process's); they can change the guards' limits.
    A file with `allow_below_guards = true` at its top is not raised (tests of short limits need this); `standby = false` there
    means no standby attempt.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an unknown key or a wrong value.
    """
    values = dict(_flat(tomllib.loads(_DEFAULTS.read_text(encoding="utf-8"))))
    path = override or os.environ.get("HANGPROOF_LIMITS")
    try:
        changes = tomllib.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it: {error}. Fix the file or unset HANGPROOF_LIMITS.") from error
    below = changes.pop("allow_below_guards", False) is True
    if isinstance(on := changes.get("standby"), bool):
        changes["standby"] = {} if on else {"tries_count": 0}
    for key, value in _flat(changes):
        if key not in values:
            raise ConfigError(f"{path}: unknown key {key}. Use a key of {_DEFAULTS}.")
        types, expected = _UNITS[key.rpartition("_")[2]]
        if isinstance(value, bool) or not isinstance(value, types) or not 0 <= value < math.inf:
            raise ConfigError(f"{path}: {key} = {value!r}. Use {expected}.")
        values[key] = value
    for key, least_s in {} if below else limits.minimums(environ).items():
        values[key] = max(values[key], least_s)
        if key.endswith(".floor_s"):  # above its ceiling it would have no effect
            ceiling = key.replace("floor_s", "ceiling_s")
            values[ceiling] = max(values[ceiling], least_s)

    def section(name: str) -> dict[str, Any]:
        return {key.rpartition(".")[2]: value for key, value in values.items() if key.rpartition(".")[0] == name}

    phases = (key.split(".")[1] for key in values if key.endswith(".floor_s"))
    return Config(
        phases={name: Phase(**section(f"phases.{name}")) for name in phases},
        watch=Watching(**section("watch")),
        end=Ending(**section("end")),
        restart=Restart(**section("restart")),
        check=Check(**section("check")),
        store=Store(**section("store")),
        standby=Standby(**section("standby")),
        slow=Slow(**section("slow")),
    )


def _flat(table: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a TOML table by dotted key."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{section}{key}.")
        else:
            yield f"{section}{key}", value
