"""A held-out image is never trained on: sd-scripts' training part loses the images that its validation part has.

sd-scripts rounds the size of both parts apart (library/train_util.py, split_train_val: `ceil(n * (1 - split))` images
train, `round(n * split)` validate), so that with 6 images and a split of 0.25 one image is in both, and its loss falls
with the training. This is about numbers, not about hangs; without a seed for the split nothing is changed, because the
parts then come from two different shuffles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sd_scripts_patches.patch import Patch, around, function, uses


@around
def _apart(
    original: Callable,
    paths: list[str],
    sizes: list,
    is_training_dataset: bool,
    validation_split: float,
    validation_seed: int | None,
) -> Any:
    found, found_sizes = original(paths, sizes, is_training_dataset, validation_split, validation_seed)
    if not is_training_dataset or validation_seed is None:
        return found, found_sizes
    held = set(original(paths, sizes, False, validation_split, validation_seed)[0])
    kept = [(path, size) for path, size in zip(found, found_sizes) if path not in held]  # noqa: B905 - Python 3.10
    return [path for path, _ in kept], [size for _, size in kept]


PATCH = Patch(
    name="validation",
    why="an image that is held out for validation must not be trained on",
    targets=(
        function(
            "library.train_util",
            "split_train_val(paths, sizes, is_training_dataset, validation_split, validation_seed)",
            _apart,
            optional=True,
        ),
    ),
    relevant=uses("--validation_split"),
)
