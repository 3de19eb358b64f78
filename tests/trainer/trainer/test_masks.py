"""What a mask does to real training: below it, the loss of an image is left out.

A learning rate that changes no weight makes the losses of two runs comparable step by step: below a black mask the loss
is exactly 0, with a white one it is that of the image without a mask, with half a mask it is that of the other half.
"""

import pytest
from PIL import Image
from trainer_helpers import make_config, make_images, metrics, trained

EPOCHS = 2


def mask(images):
    """Of five images, two are ignored, one is trained in its left half, the others completely."""
    for number, path in enumerate(sorted(images.glob("*.png"))):
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        alpha = Image.new("L", image.size, 0 if number in (0, 2) else 255)
        if number == 1:
            alpha.paste(0, (image.width // 2, 0, *image.size))
        image.putalpha(alpha)
        image.save(path)


def test_the_built_in_trainer_leaves_the_ignored_part_out_of_its_loss(work, tmp_path):
    images = make_images(tmp_path / "images")
    plain, config, three = (tmp_path / f"{name}.toml" for name in ("plain", "masked", "three"))
    for path, size in ((plain, 1), (config, 1), (three, 3)):
        make_config(path, images, repeats=1, batch_size=size)
        path.write_text(path.read_text() + ("" if path == plain else "alpha_mask = true\n"))
    settings = {"max_train_steps": None, "max_train_epochs": EPOCHS, "learning_rate": 1e-30}

    def losses(config, name):
        return [row["loss"] for row in metrics(trained(work, name, config=config, **settings))]

    whole = losses(plain, "whole")
    mask(images)
    masked = losses(config, "masked")
    pairs = list(zip(whole, masked, strict=True))
    assert len(pairs) == 5 * EPOCHS and masked.count(0) == 2 * EPOCHS and min(whole) > 0
    assert sum(0.1 * one < below < 0.9 * one for one, below in pairs) == EPOCHS, pairs
    assert sum(below == pytest.approx(one, rel=1e-4) for one, below in pairs) == 2 * EPOCHS, pairs
    cached = {path: path.stat().st_mtime_ns for path in images.glob(".hangproof-cache/latents-*")}
    assert losses(config, "again") == masked  # from the cache, which has the masks
    assert {path: path.stat().st_mtime_ns for path in images.glob(".hangproof-cache/latents-*")} == cached
    # The third image is a batch of its own, the first is in one with two that are trained.
    assert losses(three, "three").count(0) == EPOCHS
