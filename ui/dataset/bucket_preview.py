"""In which bucket each image of a draft is trained: a step holds images of one bucket, so the buckets decide the number of steps.

The settings are those of the `dataset.toml` that a run with these settings gets (runs/command.py), and the rules are
the trainers' own: trainer/buckets.py for sd-scripts and the built-in trainer, `BucketSelector` of musubi-tuner
(src/musubi_tuner/dataset/bucket.py) here. tests/upstream/test_bucket_preview.py compares both with the trainers' code.
"""

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tomllib

from runs.dataset import folder_names
from trainer.buckets import Rules, Size, cover, place
from ui.dataset.draft import Item

if TYPE_CHECKING:
    from runs import RunSpec

MUSUBI_STEPS = 16  # of all its image models in presets/families


def by_folder(spec: "RunSpec", items: Sequence[Item]) -> dict[str, list[Size]]:
    """The buckets of the images in each folder of the data set; what runs.planned_steps counts."""
    rules, place_in = _settings(spec), musubi_place if spec.backend == "musubi" else place
    bucket_of = functools.lru_cache(maxsize=None)(lambda size: place_in(rules, size)[0])
    found: dict[str, list[Size]] = {}
    for item, name in zip(items, folder_names((item.folder, item.weight) for item in items), strict=True):
        found.setdefault(name, []).append(bucket_of(item.trained_size))
    return found


def _settings(spec: "RunSpec") -> Rules:
    """The bucket settings in the run's `dataset.toml`, and those of its command line that the file leaves open."""
    from runs import command

    table: dict[str, Any] = tomllib.loads(command.dataset_toml(spec))
    found = {**table.get("general", {}), **table["datasets"][0]}
    side = found["resolution"]
    values: dict[str, Any] = {"resolution": (side, side) if isinstance(side, int) else (side[0], side[1])}
    for name in ("enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale"):
        value = found.get(name, spec.extra.get(name))
        if value is not None:
            values[name] = value
    return Rules(**values)


def musubi_place(rules: Rules, image: Size) -> tuple[Size, Size]:
    """The bucket of an image with musubi-tuner's rules, and its size before the crop."""
    if not rules.enable_bucket:
        return rules.resolution, cover(image, rules.resolution)
    area = rules.resolution[0] * rules.resolution[1]
    if rules.bucket_no_upscale and image[0] * image[1] <= area:
        bucket = _whole(image[0]), _whole(image[1])
        return bucket, image
    choices = musubi_resolutions(area)
    aspect = image[0] / image[1]
    bucket = min(choices, key=lambda size: abs(size[0] / size[1] - aspect))
    return bucket, cover(image, bucket)


@functools.lru_cache(maxsize=64)
def musubi_resolutions(area: int) -> tuple[Size, ...]:
    """All buckets of musubi-tuner for an area, sorted."""
    side = int(math.sqrt(area))
    widths = range(_whole(side // 2), side + MUSUBI_STEPS, MUSUBI_STEPS)
    sizes = {(width, _whole(area // width)) for width in widths if width}
    return tuple(sorted(sizes | {(height, width) for width, height in sizes}))


def _whole(pixels: int) -> int:
    return pixels // MUSUBI_STEPS * MUSUBI_STEPS
