"""Several processes that kohya's trainers train one LoRA with: one seed, and a learning rate that follows the steps."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from guards import world as guard
from sd_scripts_patches import world


@pytest.mark.parametrize(("processes", "given", "same"), [(2, None, True), (2, 7, True), (1, None, False)])
def test_all_ranks_of_kohyas_trainers_have_one_seed(monkeypatch, processes, given, same):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", guard.VARIABLE, guard.NODE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    launched = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29400, "ACCELERATE_USE_CPU": "true"}
    seeds = []
    for rank in range(2):
        for name, value in {**launched, "RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        seeds.append(world._check_first(lambda trainer, args: args.seed)(None, Namespace(seed=given)))
    assert seeds[0] == seeds[1] and (seeds[0] is not None) == same and given in (None, seeds[0])


@pytest.mark.parametrize("processes", [1, 2])
def test_the_learning_rate_is_stepped_once_for_each_step_and_planned_for_these(monkeypatch, processes):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    scheduler = SimpleNamespace(split_batches=False)
    world._one_step_each(lambda self, inner: None)(scheduler, "the learning rate")
    assert scheduler.split_batches == (processes > 1)
    planned = world.for_one_process(lambda args, optimizer, num_processes: num_processes)
    assert planned("args", "optimizer", processes) == planned("args", "optimizer", num_processes=processes) == 1
