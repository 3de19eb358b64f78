"""An unreadable image in a real training with sd-scripts."""

import re

import patches_helpers
import pytest
import tiny_sd_scripts as tiny


@pytest.mark.parametrize("cached", [False, True])
def test_an_unreadable_image_is_replaced_named_and_counted_or_ends_the_run_while_images_are_cached(
    each_work, tmp_path, cached
):
    """Its second half is missing: the header is intact, so it is in the data set. Steps and epochs keep their number."""
    bad = tiny.copy_of(each_work, tmp_path) / "1_thing" / "004.png"
    bad.write_bytes(bad.read_bytes()[:6000])
    args = tiny.arguments(
        each_work, tmp_path, train_data_dir=str(bad.parents[1]), max_train_epochs="2", max_data_loader_n_workers="1"
    )
    args = [argument for argument in args if argument != "--cache_latents"] + ["--cache_latents"] * cached
    env = tiny.environment(each_work, TINY_LOSSES=str(tmp_path / "losses"))
    result = patches_helpers.watch(tiny.command(*args), env, tiny.checkout(), 300, int(cached))
    named = f"image {bad} cannot be read (OSError: image file is truncated"
    assert named in result.log
    if not cached:
        places = [(epoch, step) for epoch, step, _ in tiny.losses(tmp_path / "losses")]
        assert places == [(epoch, step) for epoch in range(2) for step in range(10)]
        lines = re.findall(r"hangproof: batch \d+ is replaced by the next one: (.*)", result.log)
        assert len(lines) == 2 and all(line.startswith(named) for line in lines), result.log[-2000:]  # in each epoch
        assert all(line.endswith("(1 of at most 10 unreadable images)") for line in lines)
