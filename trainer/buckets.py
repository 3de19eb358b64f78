"""Aspect-ratio buckets with the rules of sd-scripts: a data set trains at the same sizes with both backends.

An image is scaled to cover its bucket, then cropped at the centre. Pure functions of sizes in pixels.
"""

import math
from dataclasses import dataclass

Size = tuple[int, int]  # width, height in pixels


@dataclass(frozen=True)
class Rules:
    """The bucket settings of a data set, with the names and defaults of dataset.toml."""

    resolution: Size
    enable_bucket: bool = False
    min_bucket_reso: int = 256
    max_bucket_reso: int = 1024
    bucket_reso_steps: int = 64
    bucket_no_upscale: bool = False


def resolutions(rules: Rules) -> list[Size]:
    """All buckets with at most the area of the resolution, sorted."""
    area, step = rules.resolution[0] * rules.resolution[1], rules.bucket_reso_steps
    square = int(math.sqrt(area) // step) * step
    found = {(square, square)}
    for width in range(rules.min_bucket_reso, rules.max_bucket_reso + 1, step):
        height = min(rules.max_bucket_reso, (area // width) // step * step)
        if height >= rules.min_bucket_reso:
            found |= {(width, height), (height, width)}
    return sorted(found)


def place(rules: Rules, image: Size) -> tuple[Size, Size]:
    """The bucket of an image, and its size after scaling and before the crop."""
    if not rules.enable_bucket:
        return rules.resolution, cover(image, rules.resolution)
    if rules.bucket_no_upscale:
        return shrink_only(rules, image)
    choices = resolutions(rules)
    if image in choices:
        return image, image
    aspect = image[0] / image[1]
    bucket = min(choices, key=lambda size: abs(size[0] / size[1] - aspect))
    return bucket, cover(image, bucket)


def cover(image: Size, bucket: Size) -> Size:
    """The size of the image after scaling to cover the bucket; the aspect ratio is kept."""
    wider = image[0] / image[1] > bucket[0] / bucket[1]
    scale = bucket[1] / image[1] if wider else bucket[0] / image[0]
    return max(bucket[0], int(image[0] * scale + 0.5)), max(bucket[1], int(image[1] * scale + 0.5))


def shrink_only(rules: Rules, image: Size) -> tuple[Size, Size]:
    """`bucket_no_upscale`: images are never enlarged; the bucket is the largest that is not larger than the image."""
    step, aspect = rules.bucket_reso_steps, image[0] / image[1]
    area = rules.resolution[0] * rules.resolution[1]
    resized = image
    if image[0] * image[1] > area:
        width, height = math.sqrt(area * aspect), math.sqrt(area / aspect)
        by_width = max(step, int(width + 0.5) // step * step)
        by_height = max(step, int(height + 0.5) // step * step)
        height_of_width = max(step, int(by_width / aspect + 0.5) // step * step)
        width_of_height = max(step, int(by_height * aspect + 0.5) // step * step)
        if abs(by_width / height_of_width - aspect) < abs(width_of_height / by_height - aspect):
            resized = by_width, int(by_width / aspect + 0.5)
        else:
            resized = int(by_height * aspect + 0.5), by_height
    bucket = resized[0] // step * step, resized[1] // step * step
    if 0 in bucket:  # smaller than one step: enlarge it to the smallest bucket
        bucket = max(step, bucket[0]), max(step, bucket[1])
        resized = cover(resized, bucket)
    return bucket, resized
