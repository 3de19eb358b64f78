"""Repeats and epochs from the number of images: pure arithmetic, held against every other choice."""

import math

from hypothesis import given, settings, strategies as st

import presets
from ui.new.form import LEAST, MOST, propose

IMAGES, BATCH, ACCUMULATION = st.integers(1, 5000), st.integers(1, 64), st.integers(1, 32)


def steps_per_epoch(images: int, repeats: int, fixed: int, batch: int, accumulation: int) -> int:
    return math.ceil(math.ceil((images * repeats + fixed) / batch) / accumulation)


def distance(steps: int) -> int:
    return max(LEAST - steps, steps - MOST, 0)


@settings(max_examples=150, deadline=None)
@given(IMAGES, st.one_of(st.just(0), st.integers(1, 20_000)), BATCH, ACCUMULATION)
def test_the_steps_are_those_of_the_plan_and_as_near_to_the_range_as_any_choice(images, fixed, batch, accumulation):
    found = propose(images, fixed, batch, accumulation)
    assert found.repeats >= 1 and found.epochs >= 1
    each = steps_per_epoch(images, found.repeats, fixed, batch, accumulation)
    assert found.steps == found.epochs * each
    if found.steps == found.epochs * each and LEAST <= found.steps <= MOST:
        return
    for repeats in range(1, 51):
        other = steps_per_epoch(images, repeats, fixed, batch, accumulation)
        for epochs in {max(1, LEAST // other), LEAST // other + 1, max(1, MOST // other)}:
            assert distance(found.steps) <= distance(epochs * other), (found, repeats, epochs)


def test_usual_data_sets_get_usual_settings():
    run = presets.defaults()["run"]
    for images, fixed, wanted in (
        (10, 0, (10, 20, 2000)), (20, 0, (10, 10, 2000)), (50, 0, (5, 8, 2000)), (100, 0, (2, 10, 2000)),
        (300, 0, (1, 8, 2400)), (5000, 0, (1, 1, 5000)), (1, 0, (96, 20, 1920)), (12, 0, (10, 17, 2040)),
        (24, 0, (10, 8, 1920)), (0, 200, (1, 10, 2000)),
        (0, 0, (run["repeats"], run["epochs"], propose(0).steps)),
    ):  # fmt: skip
        found = propose(images, fixed=fixed)
        assert (found.repeats, found.epochs, found.steps) == wanted, (images, fixed)
    assert all(LEAST <= propose(images).steps <= MOST for images in range(1, 1251)), "at batch size 1"
