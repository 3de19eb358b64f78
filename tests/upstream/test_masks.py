"""What a mask does to real training with sd-scripts; tests/trainer/trainer/test_masks.py says how it is judged."""

import json

import patches_helpers as helpers
import tiny_families as families
import tiny_sd_scripts as tiny
from mask_helpers import EPOCHS, NO_LEARNING, check, mask_images


def test_sd_scripts_leaves_the_ignored_part_out_of_its_loss(newest, tmp_path):
    """Without masks, with them over caches that have none, and again from the caches, which have them now."""
    work = families.workdir("sdxl")
    images = tiny.copy_of(work, tmp_path) / "1_thing"
    mask_images(images)

    def losses(part: str, masked: bool) -> list[float]:
        out = tmp_path / part
        out.mkdir()
        config = out / "dataset.toml"
        config.write_text(
            f"[general]\nshuffle_caption = false\n[[datasets]]\nresolution = 64\nbatch_size = 1\n"
            f"[[datasets.subsets]]\nimage_dir = {json.dumps(images.as_posix())}\nnum_repeats = 1\n"
            + ("alpha_mask = true\n" if masked else ""),
            encoding="utf-8",
        )
        off = ("train_data_dir", "resolution", "save_every_n_steps", "sample_every_n_steps", "sample_prompts")
        changed = {**dict.fromkeys(off), "dataset_config": str(config), "learning_rate": NO_LEARNING}
        changed |= {"lr_scheduler": "constant", "max_train_epochs": str(EPOCHS)}
        arguments = families.arguments("sdxl", work, images, out / "made", **changed)
        environment = families.environment("sdxl", work, "", TINY_LOSSES=str(out / "losses"), HANGPROOF_RUN=str(out))
        result = helpers.watch(families.command("sdxl", arguments, True), environment, tiny.checkout(), timeout_s=400)
        assert result.code == 0, result.log[-3000:]
        return [json.loads(line)[-1] for line in (out / "losses").read_text().splitlines()]

    whole, masked = losses("whole", False), losses("masked", True)
    check(whole, masked, families.IMAGES, each_once=False)
    again = losses("again", True)
    assert len(again) == len(masked) and again.count(0) >= EPOCHS
