"""Held-out images with sd-scripts are never trained on."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st
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
