"""Durations, counts and outside text as people read them."""

import pytest

from monitor import phrases


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"), (3.24, "3.2 s"), (59.4, "59.4 s"), (59.6, "1 min 0 s"), (310, "5 min 10 s"),
        (3599, "59 min 59 s"), (3600, "1 h 0 min"), (7500, "2 h 5 min"), (90_061, "25 h 1 min"),
    ],
)  # fmt: skip
def test_a_duration_has_at_most_two_units(seconds, text):
    assert phrases.duration(seconds) == text


def test_a_count_has_its_plural_and_text_from_outside_no_colours_and_no_control_characters():
    counts = ((1, "step"), (2_000, "step"), (0, "run"), (3, "process"))
    assert [phrases.count(*count) for count in counts] == ["1 step", "2,000 steps", "0 runs", "3 processes"]
    assert phrases.printable("\x1b[31mloss\x1b[0m\t1\x07\r\n写真") == "loss    1写真"
    assert phrases.moment("2026-11-21T11:35:46.123Z") == "2026-11-21 11:35:46 UTC"
