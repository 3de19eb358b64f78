"""Is a run slow? Its pace alone, from the durations of its steps."""

import random

import pytest
from hypothesis import given, settings, strategies as st
from monitor_traces import KINDS, step_times
from seeds import examples

from monitor.detect.progress import MIN_STEPS, OVER, SLOW, Pace

WINDOW_S = 20.0


def said(pace: Pace, steps) -> list[str]:
    """What the pace says to steps that are seen one by one."""
    return [word for step_s in steps if (word := pace.observe([step_s]))]


@pytest.mark.parametrize("usual_s", [0.5, 14.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_its_ordinary_steps_is_never_slow(kind, usual_s):
    times = step_times(kind, usual_s, random.Random(0))
    assert said(Pace(WINDOW_S), (next(times) for _ in range(3000))) == []


@settings(max_examples=examples(50))
@given(
    usual_s=st.floats(0.2, 20.0),
    jitter=st.floats(0.0, 0.3),
    share=st.floats(0.0, 0.5),
    larger=st.floats(1.0, 8.0),
    epoch=st.integers(1, 40),
    epoch_s=st.floats(0.0, 60.0),
    seed=st.integers(0, 1 << 20),
)
def test_epochs_and_images_of_two_sizes_are_not_slow(usual_s, jitter, share, larger, epoch, epoch_s, seed):
    rng = random.Random(seed)
    if epoch <= 2:  # where most steps begin an epoch, these are the usual ones
        epoch_s = min(epoch_s, usual_s)
    steps = []
    for number in range(300):
        step_s = usual_s * (1 + jitter * rng.random()) * (larger if rng.random() < share else 1)
        steps.append(step_s + (epoch_s if number % epoch == 0 else 0))
    assert said(Pace(WINDOW_S), steps) == []


@settings(max_examples=examples(50))
@given(st.floats(0.2, 20.0), st.floats(0.0, 0.3), st.floats(3.0, 150.0), st.integers(0, 1 << 20))
def test_slower_steps_are_slow_within_two_windows_and_no_longer_once_they_are_back(usual_s, jitter, factor, seed):
    rng = random.Random(seed)

    def steps(count, times=1.0):
        return [usual_s * times * (1 + jitter * rng.random()) for _ in range(count)]

    pace = Pace(WINDOW_S)
    assert said(pace, steps(40 + int(40 / usual_s))) == []
    slow_s, passed_s, count = usual_s * factor, 0.0, 0
    while not pace.slow:
        step_s = steps(1, factor)[0]
        passed_s, count = passed_s + step_s, count + 1
        words = said(pace, [step_s])
        assert passed_s <= 2 * WINDOW_S + MIN_STEPS * slow_s * 1.3, "too late"
    assert words == [SLOW] and count >= 3
    assert pace.usual_s == pytest.approx(usual_s, rel=0.35), "slow steps do not become the usual ones"
    assert said(pace, steps(500, factor)) == []
    assert said(pace, steps(40 + int(40 / usual_s))) == [OVER]
    assert pace.lost_s >= 500 * (slow_s - 1.31 * usual_s)


@pytest.mark.parametrize(
    ("expected_s", "steps", "words"),
    [
        (0.0, [1 + number / 2000 for number in range(8000)], [SLOW]),  # a speed that falls slowly
        (2.0, [5.0] * 40, []),  # from a rehearsal, three times its step is slow until the run has its own pace
        (2.0, [7.0] * 10, [SLOW]),
    ],
)
def test_a_pace_is_slow_compared_with_what_is_known(expected_s, steps, words):
    assert said(Pace(WINDOW_S, expected_s), steps) == words


def test_one_long_step_under_way_is_not_slow_and_the_third_very_long_one_is():
    pace = Pace(WINDOW_S)
    said(pace, [2.0] * 60)
    assert pace.observe([], 3600.0) == ""  # a suspended laptop, a stopped process
    assert pace.observe([277.0, 277.0], 5.0) == ""
    assert pace.observe([], 20.0) == SLOW
    assert pace.now_s(20.0) == 277.0, "what is reported is a slow step, not one of the usual ones before it"
