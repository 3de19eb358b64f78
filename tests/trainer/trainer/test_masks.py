"""What a mask does to real training with the built-in trainer.

A learning rate that changes no weight makes the losses of two runs comparable step by step: below a black mask the loss is
exactly 0, with a white one it is that of the image without a mask, and with half a mask it is that of the other half.
"""

from pathlib import Path

from mask_helpers import EPOCHS, NO_LEARNING, check, mask_images
from trainer_helpers import flags, fork, good, make_config, make_images, metrics


def with_masks(config: Path) -> Path:
    config.write_text(config.read_text(encoding="utf-8") + "alpha_mask = true\n", encoding="utf-8")
    return config


def test_the_built_in_trainer_leaves_the_ignored_part_out_of_its_loss(work, tmp_path):
    images = make_images(tmp_path / "images")
    plain = make_config(tmp_path / "plain.toml", images, repeats=1)
    config = with_masks(make_config(tmp_path / "masked.toml", images, repeats=1))
    settings = {"max_train_steps": None, "max_train_epochs": EPOCHS, "learning_rate": NO_LEARNING}

    def losses(config: Path, name: str) -> list[float]:
        run = tmp_path / f"{name}-run"
        run.mkdir()
        good(fork(flags(work["model"], config, tmp_path / name, **settings), HANGPROOF_RUN=str(run)))
        return [row["loss"] for row in metrics(run)]

    whole = losses(plain, "whole")
    mask_images(images)
    masked = losses(config, "masked")
    check(whole, masked, 5)
    cached = {path: path.stat().st_mtime_ns for path in images.glob(".hangproof-cache/latents-*")}
    assert losses(config, "again") == masked  # from the cache, which has the masks
    assert {path: path.stat().st_mtime_ns for path in images.glob(".hangproof-cache/latents-*")} == cached
    paired = losses(with_masks(make_config(tmp_path / "three.toml", images, 1, 3)), "three")
    # The third image is a batch of its own, the first is in one with two that are trained.
    assert paired.count(0) == EPOCHS
