"""The comparison of two trainings calls equal only what is."""

import math

import canary
import pytest

LOSSES = [1.5 - i / 100 for i in range(canary.STEPS)]


def changed(step: int, factor: float) -> list[float]:
    return [loss * (factor if i >= step else 1) for i, loss in enumerate(LOSSES, 1)]


@pytest.mark.parametrize(
    ("new", "tolerance", "text"),
    [
        (LOSSES, 0, ""),
        (changed(7, 1.0005), canary.TOLERANCE, ""),
        (changed(7, 1.0005), 0, "the losses differ from step 7 on, by up to 0.0005 of a loss"),
        (changed(20, 1.01), canary.TOLERANCE, "the losses differ from step 20 on, by up to 0.0099 of a loss"),
        ([*LOSSES[:11], math.nan, *LOSSES[12:]], 1e9, "the losses differ from step 12 on, by up to "),
        ([*LOSSES[:11], math.inf, *LOSSES[12:]], 1e9, "the losses differ from step 12 on, by up to "),
        (LOSSES[:-1], 1, "OLD recorded 20 losses and NEW 19, not 20"),
    ],
)
def test_losses_beyond_the_tolerance_or_that_are_no_numbers_differ(new, tolerance, text):
    found = canary.losses_differ(LOSSES, new, tolerance)
    assert found == text if not text.endswith("to ") else found.startswith(text)
