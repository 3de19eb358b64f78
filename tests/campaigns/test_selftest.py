"""The self-test at length: on musubi-tuner, and with guards left out."""

import pytest
import tiny_musubi
import tiny_sd_scripts as tiny
from selftest_helpers import MUSUBI_ROWS, finished, statuses


def test_a_good_installation_of_musubi_tuner_passes_and_is_not_touched():
    before = sorted(str(path) for path in tiny_musubi.checkout().rglob("*"))
    code, checks = finished(tiny_musubi.checkout())
    assert code == 0, checks
    assert tuple(checks) == MUSUBI_ROWS
    for name in ("caches", "train", "LoRA", "hang", "resume"):
        assert checks[name]["status"] == "ok" and not checks[name]["action"]
    assert "zimage_cache_latents.py and zimage_cache_text_encoder_outputs.py wrote 12 files" in checks["caches"]["text"]
    assert "waited 10 s for batch 4 of the data loader from worker 0" in checks["hang"]["text"]
    assert "all 12 losses equal digit for digit" in checks["resume"]["text"]
    assert sorted(str(path) for path in tiny_musubi.checkout().rglob("*")) == before


def test_without_the_guard_of_the_resume_musubi_tuner_trains_all_steps_again():
    code, checks = finished(tiny_musubi.checkout(), "--hangproof_without=resume")
    assert code == 1 and "left out by you: resume" in checks["guards"]["text"]
    assert {name for name, status in statuses(checks).items() if status == "failed"} == {"resume"}, checks


def test_without_the_guard_of_the_loader_the_hang_fails():
    code, checks = finished(tiny.checkout(), "--hangproof_without=dataloader")
    assert code == 1
    assert {name for name, status in statuses(checks).items() if status == "failed"} == {"hang"}, checks
    assert checks["hang"]["text"].startswith("a loader worker slept, and no guard ended the training: killed after ")
    assert "Do not train unattended" in checks["hang"]["action"]


@pytest.fixture(autouse=True)
def both():
    """Both trainers are there."""
    tiny.need()
    if reason := tiny_musubi.why_not():
        pytest.skip(reason)
