"""Several processes that kohya's trainers train one LoRA with: a learning rate that follows the steps."""

from types import SimpleNamespace

import pytest

from sd_scripts_patches import world


@pytest.mark.parametrize("processes", [1, 2])
def test_the_learning_rate_is_stepped_once_for_each_step_and_planned_for_these(monkeypatch, processes):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    scheduler = SimpleNamespace(split_batches=False)
    world._one_step_each(lambda self, inner: None)(scheduler, "the learning rate")
    assert scheduler.split_batches == (processes > 1)
    planned = world.for_one_process(lambda args, optimizer, num_processes: num_processes)
    assert planned("args", "optimizer", processes) == planned("args", "optimizer", num_processes=processes) == 1
