"""The preview of the buckets: a run's settings, and crops inside the image (tests/upstream compares the buckets)."""

import pytest
from draft_helpers import item
from hypothesis import given, settings, strategies as st

import runs
from ui.dataset import bucket_preview

SIDES = st.integers(1, 6000)


def test_the_settings_are_those_of_the_files_that_a_run_gets():
    spec = runs.make({"name": "x", "backend": "musubi", "model": "z-image", "resolution": 768, "batch_size": 2})
    plan = bucket_preview.plan(spec, [item("a", 768, 768), item("b", 1536, 768, folder="5_dog")])
    assert plan.resolution == 768 and plan.batch_size == 2
    found = [(one.folder, len(one.images), one.shown) for one in plan.buckets]
    assert found == [("", 1, spec.repeats), ("5_dog", 1, 5)]
    spec = runs.make({"name": "x", "resolution": 512, "batch_size": 4, "repeats": 3})
    plan = bucket_preview.plan(spec, [item("a", 512, 512), item("b", 600, 600), item("c", 900, 512, weight=2)])
    shown = [(one.size, one.images, one.shown) for one in plan.buckets]
    assert shown == [((512, 512), ("a", "b"), 6), ((640, 384), ("c",), 6)]


@settings(max_examples=50)
@given(SIDES, SIDES, st.floats(0.25, 4), st.sampled_from([None, (0.1, 0.2, 0.9, 0.7)]))
def test_a_crop_to_the_shape_of_a_bucket_lies_inside_the_crop_before(width, height, aspect, crop):
    one = item("a", width, height, crop=crop)
    left, top, right, bottom = bucket_preview.crop_for(one, aspect)
    outer = crop or bucket_preview.CENTRE
    assert outer[0] - 1e-6 <= left < right <= outer[2] + 1e-6 and outer[1] - 1e-6 <= top < bottom <= outer[3] + 1e-6
    found = (right - left) * width / ((bottom - top) * height)
    assert found == pytest.approx(aspect, rel=0.05) or min(width, height) < 64
