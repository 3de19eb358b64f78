"""Classes and functions of a checkout, without what else its modules import."""

import ast
import logging
import math
import random
from pathlib import Path
from typing import Any

import numpy
import pytest

from runs.paths import CHECKOUTS


def code_of(paths: list[Path], *names: str) -> dict[str, Any]:
    """Classes and functions of a checkout by name, without what else its modules import."""
    found: dict[str, Any] = {"np": numpy, "math": math, "random": random, "logging": logging}
    found["logger"] = logging.getLogger()
    tree = [node for path in paths if path.is_file() for node in ast.parse(path.read_bytes()).body]
    taken = [node for node in tree if getattr(node, "name", "") in names]
    taken += [n for n in tree if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]).startswith("ARCHITECTURE_")]
    names_first = sorted(taken, key=lambda node: not isinstance(node, ast.Assign))
    module = ast.Module([*ast.parse("from __future__ import annotations").body, *names_first], [])
    exec(compile(module, "checkout", "exec"), found)
    missing = [name for name in names if name not in found]
    assert not missing, f"{missing} not in {paths}"
    return found


def musubi_buckets(*names: str) -> dict[str, Any]:
    """What musubi-tuner sorts images into buckets by, and these names of the same files. Skips without a checkout."""
    if not CHECKOUTS["musubi"].installed():
        pytest.skip("no checkout of musubi-tuner (MUSUBI_DIR)")
    folder = CHECKOUTS["musubi"].path() / "src" / "musubi_tuner" / "dataset"
    files = [folder / name for name in ("architectures.py", "media_utils.py", "bucket.py", "image_video_dataset.py")]
    return code_of(files, "BucketSelector", "divisible_by", *names)
