"""Held-out images with sd-scripts are never trained on."""

from pathlib import Path

import pytest
import resume_helpers
import tiny_sd_scripts as tiny
from hypothesis import given, strategies as st
from trainer_helpers import metrics
from upstream_code import code_of

from sd_scripts_patches import validation as patch


@pytest.fixture(scope="module")
def real_split(sd_scripts):
    """`split_train_val` of the checkout, without importing its module."""
    return code_of(sorted(Path(sd_scripts, "library").glob("*.py")), "split_train_val")["split_train_val"]


@given(st.integers(1, 60), st.floats(0.01, 0.5), st.integers(0, 9))
def test_sd_scripts_never_trains_on_an_image_that_it_validates(real_split, count, share, seed):
    guarded = patch._apart(real_split)
    paths, sizes = [f"{n}.png" for n in range(count)], [(n, n) for n in range(count)]
    train, train_sizes = guarded(paths, sizes, True, share, seed)
    held, _ = guarded(paths, sizes, False, share, seed)
    assert not set(train) & set(held) and len(train) + len(held) == count
    assert train_sizes == [(int(path[:-4]),) * 2 for path in train]


def test_sd_scripts_measures_at_fixed_noise_and_the_metrics_have_it(work, tmp_path):
    """With a learning rate that changes nothing. Its own average is that of all validations of the first epoch;
    ours is that of each one. A validation follows the save of its step, so a resumed run makes it again."""
    more = ["--validation_split", "0.25", "--validation_seed", "3", "--validate_every_n_steps", "3"]
    more += ["--validate_every_n_epochs", "1000000", "--learning_rate", "1e-30"]
    more += ["--save_every_n_steps", "3", "--save_state"]
    images = str(tiny.copy_of(work, tmp_path))
    resume_helpers.train(work, tmp_path, *more, train_data_dir=images, max_train_steps="9")
    state = str(tmp_path / "made" / "tiny-step00000006-state")
    resume_helpers.train(work, tmp_path, *more, train_data_dir=images, max_train_steps="9", resume=state)
    found = metrics(tmp_path, "validation")
    assert [one["step"] for one in found] == [3, 6, 9, 6, 9] and len({one["val_loss"] for one in found}) == 1
    assert {one["items"] for one in found} == {8}  # 2 of 10 images, at 4 noise levels
