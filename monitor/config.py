"""The monitor's limits: the values of `config.toml`, each a number in the unit that its key ends in.

Decision: one table with a unit in every key, instead of constants beside the code that uses them. A file named by
`$HANGPROOF_LIMITS` replaces any value. Each value is then raised to the minimum that the guards inside the training
need (guards/limits.toml), so that the monitor never kills a process before its own deadline can end it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
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


Section = SimpleNamespace  # its keys are attributes


@dataclass(frozen=True)
class Config:
    """The sections of config.toml."""

    phases: dict[str, Section]  # floor_s, ceiling_s
    watch: Section
    end: Section
    restart: Section
    check: Section
    store: Section
    standby: Section
    slow: Section
    below_guards: bool = False  # the guards' limits do not raise these


def load(override: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """`config.toml`, with the values of `override` (default: `$HANGPROOF_LIMITS`), raised to the guards' minimums.

    environ: the variables of the training process (default: this process's); they can change the guards' limits. A file
    with `allow_below_guards = true` at its top is not raised (tests of short limits need this); `standby = false` there
    means no standby attempt.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an unknown key or a wrong value.
    """
    values = dict(_flat(tomllib.loads(_DEFAULTS.read_text(encoding="utf-8"))))
    path = override or os.environ.get("HANGPROOF_LIMITS")
    try:
        changes = tomllib.loads(Path(path).read_text(encoding="utf-8-sig")) if path else {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it: {error}. Fix the file or unset HANGPROOF_LIMITS.") from error
    below = changes.pop("allow_below_guards", False) is True
    if isinstance(on := changes.get("standby"), bool):
        changes["standby"] = {} if on else {"tries_count": 0}
    for key, value in _flat(changes):
        if key not in values:
            raise ConfigError(f"{path}: unknown key {key}. Remove it, or use a key of {_DEFAULTS}.")
        types, expected = _UNITS[key.rpartition("_")[2]]
        if isinstance(value, bool) or not isinstance(value, types) or not 0 <= value < math.inf:
            raise ConfigError(f"{path}: {key} = {value!r}. Use {expected}.")
        values[key] = value

    def section(name: str) -> Section:
        return Section(**{key.rpartition(".")[2]: v for key, v in values.items() if key.rpartition(".")[0] == name})

    phases = {key.split(".")[1]: section(key.rpartition(".")[0]) for key in values if key.endswith(".floor_s")}
    names = [field.name for field in fields(Config) if field.name not in ("phases", "below_guards")]
    loaded = Config(phases, **{name: section(name) for name in names}, below_guards=below)
    enclose(loaded, environ)
    return loaded


def enclose(config: Config, environ: Mapping[str, str] | None = None) -> None:
    """Raise what must be longer than the guards' limits in a process with these variables (default: this one's)."""
    for key, least_s in {}.items() if config.below_guards else minimums(environ).items():
        *_, section, name = key.split(".")
        values = config.phases[section] if key.startswith("phases.") else getattr(config, section)
        setattr(values, name, max(getattr(values, name), least_s))
        if name == "floor_s":  # above its ceiling it would have no effect
            values.ceiling_s = max(values.ceiling_s, least_s)


def minimums(environ: Mapping[str, str] | None = None) -> dict[str, float]:
    """Key of config.toml -> the least seconds it must have: the largest limit + grace of a training that it encloses.

    environ: the variables that the training process has (default: this process's). A limit that is switched off, or
    that the training process refuses because it is no number, encloses nothing.
    """
    environ, least = os.environ if environ is None else environ, dict[str, float]()
    for name, limit in limits.TABLE.items():
        given = environ.get(f"HANGPROOF_{name.upper()}") if limit.user else None
        with contextlib.suppress(ValueError):
            inner_s = float(given or limit.default_s)
            for key in limit.outer if 0 < inner_s < math.inf else ():
                least[key] = max(least.get(key, 0.0), inner_s + limit.grace_s)
    return least


def _flat(table: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a TOML table by dotted key."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{section}{key}.")
        else:
            yield f"{section}{key}", value
