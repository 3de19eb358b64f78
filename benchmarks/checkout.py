"""What benchmarks use of a checkout: its toy loop, limits for its monitor, and the modules that tests share."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from runs.paths import ROOT

Limits = dict[str, dict[str, float]]


def support(name: str) -> Any:
    """A module that the tests share; their folder is added to the path."""
    if (folder := str(ROOT / "tests/support")) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def tiny_sd_scripts() -> Any:
    """The module that trains tiny weights with a checkout of sd-scripts."""
    return support("tiny_sd_scripts")


def toy_loop(root: Path = ROOT) -> Path:
    """The training loop of the checkout: it writes the heartbeats that the monitor beside it reads."""
    return root / "benchmarks" / "toy_loop.py"


def limits_toml(values: Limits) -> str:
    """A limits file. `values`: section -> key -> number."""
    return "".join(
        f"[{section}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())
        for section, keys in values.items()
    )
