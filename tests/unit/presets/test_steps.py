"""The steps of a run, as its trainer counts them."""

from runs_helpers import spec

import runs


def test_planned_steps_count_every_process_and_leave_out_what_is_held_out():
    for fields, images, steps in (
        ({"batch_size": 2}, 3, 240),
        ({"batch_size": 4}, 1, 48),
        ({"batch_size": 2, "gpus": 2, "gradient_accumulation": 2}, 3, 64),
        ({"batch_size": 2, "nodes": 2, "gradient_accumulation": 2}, 3, 64),
        ({"max_train_steps": 7}, 3, 7),
    ):
        assert runs.planned_steps(spec(**fields), {"": images}) == steps
    held_out = runs.make({"name": "t", "model": "tiny-flux", "repeats": 1, "epochs": 2, "validation_split": 0.25})
    found = [runs.planned_steps(held_out, images) for images in ({"": 4}, {"": 8}, {"": 4, "3_cat": 4})]
    assert found == [6, 12, 2 * (3 + 9)]
