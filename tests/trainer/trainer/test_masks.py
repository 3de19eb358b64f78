"""What a mask does to real training with the built-in trainer.

A learning rate that changes no weight makes the losses of two runs comparable step by step: below a black mask the loss
is exactly 0, with a white one it is that of the image without a mask, with half a mask it is that of the other half.
"""

from pathlib import Path

from mask_helpers import EPOCHS, NO_LEARNING, check, mask_images
from trainer_helpers import make_config, make_images, metrics, trained


def test_the_built_in_trainer_leaves_the_ignored_part_out_of_its_loss(work, tmp_path):
    images = make_images(tmp_path / "images")
    plain, config, three = (tmp_path / f"{name}.toml" for name in ("plain", "masked", "three"))
    for path, size in ((plain, 1), (config, 1), (three, 3)):
        make_config(path, images, repeats=1, batch_size=size)
        path.write_text(path.read_text() + ("" if path == plain else "alpha_mask = true\n"))
    settings = {"max_train_steps": None, "max_train_epochs": EPOCHS, "learning_rate": NO_LEARNING}

    def losses(config: Path, name: str) -> list[float]:
        return [row["loss"] for row in metrics(trained(work, name, config=config, **settings))]

    whole = losses(plain, "whole")
    mask_images(images)
    masked = losses(config, "masked")
    check(whole, masked, 5)
    cached = {path: path.stat().st_mtime_ns for path in images.glob(".hangproof-cache/latents-*")}
    assert losses(config, "again") == masked  # from the cache, which has the masks
    assert {path: path.stat().st_mtime_ns for path in images.glob(".hangproof-cache/latents-*")} == cached
    # The third image is a batch of its own, the first is in one with two that are trained.
    assert losses(three, "three").count(0) == EPOCHS
