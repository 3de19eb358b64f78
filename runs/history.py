"""How long a run takes: by the speed of earlier runs on this machine, else by the table of GPU classes.

A run counts when its model, trainer, tier, resolution, batch and precision are the same. Only `run.toml` and
`status.json` are read, and again only after they changed, because the page asks at every change of a field.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomllib

from presets.estimate import samples_s, table_time
from runs.paths import list_runs

if TYPE_CHECKING:
    from runs.spec import RunSpec

SAME = (
    *("model", "backend", "tier", "resolution", "batch_size", "gradient_accumulation", "mixed_precision"),
    *("gpus", "nodes"),
)
MIN_STEPS = 10  # the first steps of a run are slower than the others


@dataclass(frozen=True)
class Speed:
    """Of an earlier run: its name, seconds of a step, and seconds besides steps (None where it did not complete)."""

    name: str
    step_s: float
    other_s: float | None
    at: str


def expected(spec: "RunSpec", steps: int) -> tuple[float, str]:
    """Seconds of a complete run of so many steps, and what this is based on."""
    fields = spec.model_dump()
    if (before := earlier(fields)) is not None:
        other_s = before.other_s if before.other_s is not None else table_time(fields)[1]
        return steps * before.step_s + other_s, f"measured on this machine in the run “{before.name}”"
    step_s, start_s, source = table_time(fields)
    other_s = start_s + samples_s(fields, len(spec.prompts) or 1, step_s, steps)
    return steps * step_s + other_s, f"{source}; your machine may need half or twice as long"


def earlier(spec: Mapping[str, Any]) -> Speed | None:
    """The newest earlier run with the settings of `spec` (fields of a RunSpec); None without one."""
    found = []
    for folder in list_runs():
        try:
            stamps = tuple((folder / name).stat().st_mtime_ns for name in ("run.toml", "status.json"))
        except OSError:
            continue
        fields, speed = _read(folder, stamps)
        if speed is not None and fields == _compared(spec):
            found.append(speed)
    return max(found, key=lambda one: (one.other_s is not None, one.at), default=None)


@functools.lru_cache(maxsize=512)
def _read(folder: Path, stamps: tuple[int, ...]) -> tuple[dict[str, Any], Speed | None]:
    """The fields of a run that `earlier` compares, and its speed; None where it has none."""
    try:
        fields = tomllib.loads((folder / "run.toml").read_text(encoding="utf-8-sig"))
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        step, step_s, at = int(status["step"]), float(status["step_s"] or 0), str(status["updated_at"])
        whole = status["state"] == "completed" and status["restarts"] == 0
        took_s = float(status["elapsed_s"])  # without a pause, and the days before it was trained longer
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}, None
    if step < MIN_STEPS or step_s <= 0:
        return {}, None
    other_s = max(0.0, took_s - step * step_s) if whole else None
    return _compared(fields), Speed(str(fields.get("name", folder.name)), step_s, other_s, at)


def _compared(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that must be the same."""
    return {key: fields.get(key) for key in SAME}
