"""The sizes of images: sd-scripts' own."""

from trainer.buckets import Rules, place, resolutions


def test_buckets_are_those_of_sd_scripts():
    """Values from sd-scripts v0.10.1 (`model_util.make_bucket_resolutions`, `BucketManager.select_bucket`)."""
    rules = Rules((512, 512), enable_bucket=True, max_bucket_reso=1024)
    assert resolutions(rules)[:3] == [(256, 832), (256, 896), (256, 960)] and len(resolutions(rules)) == 17
    assert place(rules, (1000, 1000)) == ((512, 512), (512, 512))
    assert place(rules, (1600, 1000)) == ((640, 384), (640, 400))
    assert place(rules, (1000, 3000)) == ((256, 832), (277, 832))
    assert place(Rules((512, 512)), (1000, 500)) == ((512, 512), (1024, 512))
    small = Rules((512, 512), enable_bucket=True, bucket_no_upscale=True)
    assert place(small, (300, 200)) == ((256, 192), (300, 200))
    assert place(small, (2000, 1000)) == ((640, 320), (640, 320))
    assert place(small, (1234, 777)) == ((640, 384), (640, 403))
    assert place(small, (20, 10))[0] == (64, 64)
