"""Repeats and epochs from the number of images: pure arithmetic, held against every other choice."""

from hypothesis import given, settings
from hypothesis import strategies as st

import presets
from runs.proposal import LEAST, MOST, propose, steps_per_epoch

IMAGES, BATCH, ACCUMULATION = st.integers(1, 5000), st.integers(1, 64), st.integers(1, 32)


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


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 1250))
def test_up_to_1250_images_give_1500_to_2500_steps_at_batch_size_1(images):
    assert LEAST <= propose(images).steps <= MOST


def test_usual_data_sets_get_usual_settings():
    assert [(propose(n).repeats, propose(n).epochs, propose(n).steps) for n in (10, 20, 25, 50, 100)] == [
        (10, 20, 2000), (10, 10, 2000), (10, 8, 2000), (5, 8, 2000), (2, 10, 2000),
    ]  # fmt: skip
    assert propose(300).steps == 2400 and propose(300).repeats == 1  # the defaults give 48,000


def test_more_images_than_steps_are_each_used_once():
    found = propose(5000)
    assert (found.repeats, found.epochs, found.steps) == (1, 1, 5000)


def test_folders_with_their_own_repeats_are_counted():
    found = propose(0, fixed=200)
    assert (found.repeats, found.epochs, found.steps) == (1, 10, 2000)
    assert propose(10, fixed=100).steps == propose(10, fixed=100).epochs * (10 * propose(10, fixed=100).repeats + 100)


def test_without_images_the_defaults_stay():
    run = presets.defaults()["run"]
    assert (propose(0).repeats, propose(0).epochs) == (run["repeats"], run["epochs"])
