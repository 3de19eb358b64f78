"""The file that holds the state of the training loop."""

import json
import random

import numpy
import pytest
import torch

from sd_scripts_patches import legacy_state, trainer_state


@pytest.mark.parametrize("content", ["{", "[1]", '{"version": 9}', '{"version": 1, "steps": 3}'])
def test_a_damaged_trainer_state_is_refused(tmp_path, content):
    (tmp_path / "train_state.json").write_text(json.dumps({"current_epoch": 2, "current_step": 12}))
    (tmp_path / trainer_state.FILE).write_text(content)
    with pytest.raises(trainer_state.ResumeError, match=trainer_state.FILE):
        legacy_state.check_state(tmp_path)


def test_the_generators_come_back_from_json():
    def draw():
        return [random.random(), random.gauss(0, 1), float(numpy.random.normal()), float(torch.randn(()))]

    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    draw()  # random.gauss keeps the second of each pair of numbers
    state = json.loads(json.dumps(trainer_state.generators()))
    expected = draw()
    assert draw() != expected
    assert trainer_state.restore(state) == []
    assert draw() == expected
