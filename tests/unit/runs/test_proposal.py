"""Repeats and epochs from the number of images: pure arithmetic, held against every other choice."""

import presets
from runs.proposal import LEAST, MOST, propose


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
