"""The preview of the buckets, against the trainers' own code, taken from checkouts of sd-scripts and musubi-tuner."""

import random

import pytest
from upstream_code import code_of, musubi_buckets

import runs
from runs.paths import CHECKOUTS
from trainer.buckets import Rules, place
from ui.dataset import bucket_preview


@pytest.fixture(scope="module")
def bucket_manager():
    checkout = CHECKOUTS["sd-scripts"]
    if not checkout.installed():
        pytest.skip("no checkout of sd-scripts (SD_SCRIPTS_DIR)")
    library = checkout.path() / "library"
    util = code_of([library / "model_util.py"], "make_bucket_resolutions")
    found = code_of([library / "dataset.py", library / "train_util.py"], "BucketManager")
    found["model_util"] = type("module", (), {"make_bucket_resolutions": staticmethod(util["make_bucket_resolutions"])})
    return found["BucketManager"]


@pytest.mark.parametrize("resolution", [64, 256, 512, 768, 1024, 1344])
@pytest.mark.parametrize("no_upscale", [False, True])
def test_each_image_goes_into_the_bucket_of_sd_scripts(bucket_manager, resolution, no_upscale):
    spec = runs.make({"name": "x", "backend": "sd-scripts", "model": "sdxl", "resolution": resolution})
    rules = bucket_preview._settings(spec)
    assert rules.enable_bucket and rules.resolution == (resolution, resolution)
    rules = Rules(**{**rules.__dict__, "bucket_no_upscale": no_upscale})
    limits = (rules.min_bucket_reso, rules.max_bucket_reso, rules.bucket_reso_steps)
    theirs = bucket_manager(no_upscale, rules.resolution, *limits)
    if not no_upscale:
        theirs.make_buckets()
    draw, compared = random.Random(7), 0
    for _ in range(600):
        size = draw.randint(64, 5000), draw.randint(64, 5000)
        if not 0.2 < size[0] / size[1] < 5:
            continue
        try:
            bucket, resized, _ = theirs.select_bucket(*size)
        except ZeroDivisionError:
            assert resolution == 64 and no_upscale  # no bucket is narrower than its steps: sd-scripts fails
            continue
        if 0 in bucket:
            continue  # sd-scripts fails on it later
        compared += 1
        assert (tuple(bucket), tuple(resized)) == place(rules, size), size
    assert compared > (5 if resolution == 64 else 100)


@pytest.mark.parametrize("resolution", [256, 512, 960, 1024, 1328])
def test_each_image_goes_into_the_bucket_of_musubi_tuner(resolution):
    code = musubi_buckets()
    rules = Rules((resolution, resolution), True)
    for name in ("ARCHITECTURE_Z_IMAGE", "ARCHITECTURE_FLUX_2_DEV", "ARCHITECTURE_QWEN_IMAGE", "ARCHITECTURE_WAN"):
        theirs = code["BucketSelector"](rules.resolution, True, False, code[name])
        assert theirs.reso_steps == bucket_preview.MUSUBI_STEPS
        assert tuple(theirs.bucket_resolutions) == bucket_preview.musubi_resolutions(resolution**2)
        draw = random.Random(3)
        for _ in range(200):
            size = draw.randint(32, 5000), draw.randint(32, 5000)
            bucket, _ = bucket_preview.musubi_place(rules, size)
            assert tuple(theirs.get_bucket_resolution(size)) == bucket, size
