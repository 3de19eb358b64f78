"""Another checkout of the project under the same benchmark: its monitor, its toy loop, its names for the limits."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from runs.paths import ROOT

RENAMED = {"min_sample_count": "few", "warm_sample_count": "well_known", "warmup_floor_s": "young_floor"}
ADDED = ("script_idle_s", "preempt_total_s")  # limits that older checkouts do not have
UNITS = ("_s", "_count", "_bytes")

Limits = dict[str, dict[str, float]]


def tiny_sd_scripts() -> Any:
    """The module that trains tiny weights with a checkout of sd-scripts; the tests share it, and their folder is added to the path."""
    if (folder := str(ROOT / "tests/support")) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("tiny_sd_scripts")


def toy_loop(root: Path = ROOT) -> Path:
    """The training loop of the checkout: it writes the heartbeats that the monitor beside it reads."""
    return root / "benchmarks" / "toy_loop.py"


def limits_toml(values: Limits, root: Path = ROOT) -> str:
    """A limits file for the checkout in `root`. `values`: section -> key -> number, in the names of today."""
    old = (root / "monitor" / "limits.toml").exists() and not (root / "monitor" / "config.toml").exists()
    lines = []
    for section, keys in values.items():
        lines.append(f"[{section}]")
        for key, value in keys.items():
            if not old:
                lines.append(f"{key} = {value}")
            elif key not in ADDED:
                lines.append(f"{RENAMED.get(key) or _without_unit(key)} = {value}")
    return "\n".join(lines) + "\n"


def _without_unit(key: str) -> str:
    for unit in UNITS:
        if key.endswith(unit):
            return key.removesuffix(unit)
    return key
