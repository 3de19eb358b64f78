"""In which bucket each image of a draft is trained, what of it is kept, and how many images each bucket has.

The settings are those of the `dataset.toml` that a run with these settings gets (runs/command.py), and the rules are
the trainers' own: trainer/buckets.py for sd-scripts and the built-in trainer, `BucketSelector` of musubi-tuner
(src/musubi_tuner/dataset/bucket.py) here. tests/upstream/ui/dataset/test_bucket_preview.py compares both with the trainers' code.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from presets.steps import repeats_of
from runs.dataset import folder_names
from trainer.buckets import Rules, Size, cover, place
from ui.dataset.draft import Item

if TYPE_CHECKING:
    from runs import RunSpec

MUSUBI_STEPS = 16  # of all its image models in presets/families
CENTRE = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Slot:
    """Where an image is trained. kept: the share of its area that is left after the crop; part: that part, as fractions
    of the image after its own crop."""

    bucket: Size
    kept: float
    part: tuple[float, float, float, float]


@dataclass(frozen=True)
class Bucket:
    """A bucket with its images, by id. shown: how often an epoch shows them, with their repeats. folder: of
    musubi-tuner, which makes buckets of their own for each folder; "" for all. few: fewer than a batch."""

    size: Size
    folder: str
    images: tuple[str, ...]
    shown: int
    few: bool


@dataclass(frozen=True)
class Plan:
    """The buckets of a data set, the largest number of images first."""

    slots: Mapping[str, Slot]
    buckets: Sequence[Bucket]
    batch_size: int
    resolution: int


def plan(spec: "RunSpec", items: Sequence[Item]) -> Plan:
    """The buckets of these images with the settings of a run."""
    settings, musubi = _settings(spec), spec.backend == "musubi"
    slot_of = functools.lru_cache(maxsize=None)(lambda size: _slot(settings, musubi, size))
    slots = {item.id: slot_of(item.trained_size) for item in items}
    members: dict[tuple[Size, str], list[str]] = {}
    shown: dict[tuple[Size, str], int] = {}
    for item in items:
        key = slots[item.id].bucket, item.folder if musubi else ""
        members.setdefault(key, []).append(item.id)
        repeats = (repeats_of(item.folder) or (spec.repeats, ""))[0]
        shown[key] = shown.get(key, 0) + repeats * item.weight
    buckets = [Bucket(*key, tuple(ids), shown[key], shown[key] < spec.batch_size) for key, ids in members.items()]
    buckets.sort(key=lambda one: (-len(one.images), one.size, one.folder))
    return Plan(slots, buckets, spec.batch_size, spec.resolution)


def by_folder(spec: "RunSpec", items: Sequence[Item]) -> dict[str, list[Size]]:
    """The buckets of the images in each folder of the data set; what runs.planned_steps counts."""
    slots = plan(spec, items).slots
    found: dict[str, list[Size]] = {}
    for item, name in zip(items, folder_names((item.folder, item.weight) for item in items), strict=True):
        found.setdefault(name, []).append(slots[item.id].bucket)
    return found


def _settings(spec: "RunSpec") -> Rules:
    """The bucket settings in the run's `dataset.toml`, and those of its command line that the file leaves open."""
    from runs import command

    table = command.dataset_tables(spec)
    found = {**table.get("general", {}), **table["datasets"][0]}
    side = found["resolution"]
    values: dict[str, Any] = {"resolution": (side, side) if isinstance(side, int) else (side[0], side[1])}
    for name in ("enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale"):
        value = found.get(name, spec.extra.get(name))
        if value is not None:
            values[name] = value
    return Rules(**values)


def _slot(rules: Rules, musubi: bool, image: Size) -> Slot:
    bucket, resized = musubi_place(rules, image) if musubi else place(rules, image)
    kept_width, kept_height = min(1.0, bucket[0] / resized[0]), min(1.0, bucket[1] / resized[1])
    left, top = (1 - kept_width) / 2, (1 - kept_height) / 2  # both trainers crop at the centre
    return Slot(bucket, kept_width * kept_height, (left, top, 1 - left, 1 - top))


def musubi_place(rules: Rules, image: Size) -> tuple[Size, Size]:
    """The bucket of an image with musubi-tuner's rules, and its size before the crop. A run always has buckets there,
    and small images are enlarged."""
    choices = musubi_resolutions(rules.resolution[0] * rules.resolution[1])
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


def crop_for(item: Item, aspect: float) -> tuple[float, float, float, float]:
    """The crop of an image at its centre, inside its own crop, that has the aspect ratio of a bucket."""
    left, top, right, bottom = item.crop or CENTRE
    width, height = (right - left) * item.width, (bottom - top) * item.height
    kept_width, kept_height = min(width, height * aspect), min(height, width / aspect)
    x, y = (width - kept_width) / 2 / item.width, (height - kept_height) / 2 / item.height
    return round(left + x, 6), round(top + y, 6), round(right - x, 6), round(bottom - y, 6)
