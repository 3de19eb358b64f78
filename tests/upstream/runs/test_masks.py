"""What a mask does to real training with sd-scripts; tests/trainer/trainer/test_loop.py says how it is judged."""

import json

import resume_helpers
import tiny_sd_scripts as tiny
from mask_helpers import EPOCHS, NO_LEARNING, check, mask_images

ON_DISK = ("--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk")


def test_sd_scripts_leaves_the_ignored_part_out_of_its_loss(work, tmp_path):
    """Without masks, then with them over caches that have none."""
    images = tiny.copy_of(work, tmp_path) / "1_thing"
    mask_images(images)

    def losses(part: str, more: str) -> list[float]:
        config = tmp_path / f"{part}.toml"
        config.write_text(
            f"[general]\nshuffle_caption = false\n[[datasets]]\nresolution = 64\nbatch_size = 1\n[[datasets.subsets]]\n"
            f"image_dir = {json.dumps(images.as_posix())}\nnum_repeats = 1\n{more}",
            encoding="utf-8",
        )
        changed = {"train_data_dir": None, "resolution": None, "dataset_config": str(config)}
        changed |= {"lr_scheduler": "constant", "learning_rate": NO_LEARNING, "max_train_epochs": str(EPOCHS)}
        resume_helpers.train(work, tmp_path / part, *ON_DISK, **changed)
        return [loss for *_, loss in tiny.losses(tmp_path / part / "losses")]

    whole, masked = losses("whole", ""), losses("masked", "alpha_mask = true\n")
    check(whole, masked, 10, each_once=False)
