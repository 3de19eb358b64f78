"""Images with masks, and what the losses of a run on them must be; with NO_LEARNING two runs are comparable."""

from pathlib import Path

import pytest
from PIL import Image

NO_LEARNING = "1e-30"
EPOCHS = 2


def mask_images(folder: Path) -> None:
    """Give the images alpha channels: the first and the third are ignored, the second is trained in its left half, the
    others completely.
    """
    for number, path in enumerate(sorted(folder.glob("*.png"))):
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        alpha = Image.new("L", image.size, 0 if number in (0, 2) else 255)
        if number == 1:
            alpha.paste(0, (image.width // 2, 0, *image.size))
        image.putalpha(alpha)
        image.save(path)


def check(whole: list[float], masked: list[float], images: int, each_once: bool = True) -> None:
    """Judge the losses of the same steps without and with the masks of `mask_images`.

    each_once: each epoch shows each image once. With kohya's trainers, the first image of an epoch is drawn before the
    epoch's order is made (`collator_class` in library/train_util.py), so that it can come twice and another one not at
    all: two are ignored, so that each epoch shows one of them.
    """
    assert len(whole) == len(masked) == images * EPOCHS and min(whole) > 0, (whole, masked)
    pairs = list(zip(whole, masked, strict=True))
    none = [one for one in pairs if one[1] == 0]
    half = [one for one in pairs if 0.1 * one[0] < one[1] < 0.9 * one[0]]
    same = [one for one in pairs if one[1] == pytest.approx(one[0], rel=1e-4)]
    assert len(none) + len(half) + len(same) == len(pairs) and min(len(none), len(half)) >= 1, pairs
    if each_once:
        assert (len(none), len(half)) == (2 * EPOCHS, EPOCHS), pairs
