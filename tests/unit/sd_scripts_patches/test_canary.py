"""The canary says "equal" only for two installations that train the same, and what differs otherwise."""

import math

import pytest

from sd_scripts_patches import canary


def outcome(losses=None, peak=1_000_000_000, step_s=0.1, sample="a.png", error=""):
    return canary.Outcome("X", losses or [1.5 - i / 100 for i in range(20)], peak, step_s, sample, error)


def losses_with(step: int, factor: float) -> list[float]:
    losses = outcome().losses
    return [loss * (factor if i >= step else 1) for i, loss in enumerate(losses, 1)]


def verdicts(new, pixels=(0.0, 0), tolerance=canary.TOLERANCE) -> dict[str, tuple[bool | None, str]]:
    return {v.what: (v.equal, v.text) for v in canary.compare(outcome(), new, pixels, tolerance)}


def test_losses_within_the_tolerance_are_equal_and_the_first_other_step_is_named():
    equal, text = verdicts(outcome(losses_with(7, 1.0005)))["losses"]
    assert equal is True
    assert text == "The losses differ from step 7 on, by at most 0.0005 of a loss: within the tolerance of 0.10%."
    assert verdicts(outcome(losses_with(7, 1.0005)), tolerance=0)["losses"][0] is False


def test_losses_beyond_the_tolerance_are_not_equal():
    equal, text = verdicts(outcome(losses_with(20, 1.01)))["losses"]
    assert equal is False and text.startswith("The losses differ from step 20 on, by at most 0.0099")
    assert text.endswith("more than the tolerance of 0.10%.")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_never_equal(value):
    losses = [*outcome().losses[:11], value, *outcome().losses[12:]]
    equal, text = verdicts(outcome(losses), tolerance=1e9)["losses"]
    assert equal is False and text == "The losses differ from step 12 on; in step 12 one is no number."


@pytest.mark.parametrize(
    ("pixels", "expected"), [((0.0, 0), True), ((1.9, 30), True), ((2.1, 3), False), (None, False)]
)
def test_the_sample_decides_by_its_mean_difference(pixels, expected):
    assert verdicts(outcome(sample="a.png" if pixels else ""), pixels)["sample"][0] is expected


def test_memory_decides_and_time_does_not():
    assert verdicts(outcome(peak=1_240_000_000))["memory"][0] is True
    equal, text = verdicts(outcome(peak=1_260_000_000, step_s=9.0))["memory"]
    assert equal is False and text == (
        "Peak memory: 1.00 GB before, 1.26 GB after (+26%), more than the tolerance of +25%."
    )
    assert verdicts(outcome(step_s=9.0))["speed"][0] is None
    assert verdicts(outcome(peak=0))["memory"] == (None, "The peak memory is not known on this system.")


def test_a_run_that_failed_decides_alone():
    assert verdicts(outcome([1.0], error="it exited with code 1: OSError: disk full")) == {
        "training": (False, "X: it exited with code 1: OSError: disk full.")
    }
