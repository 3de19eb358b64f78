"""Learning rates, the options of optimizers, and the average that a schedule-free one keeps."""

import pytest
import torch
from flux_parts import arguments
from transformers import get_scheduler

from trainer import optimizers
from trainer.errors import TrainError


@pytest.mark.parametrize("kind", ["constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_learning_rates_are_those_of_transformers(kind):
    args = arguments(lr_scheduler=kind, lr_warmup_steps=5, lr_scheduler_num_cycles=2, learning_rate=1e-3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    special = {"cosine_with_restarts": {"num_cycles": 2}}.get(kind)
    schedule = get_scheduler(kind, optimizer, 5, 30, scheduler_specific_kwargs=special)
    for step in range(30):
        assert 1e-3 * optimizers.factor(args, step, 30) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9, abs=1e-15)
        optimizer.step()
        schedule.step()


def test_an_optimizer_option_that_does_not_exist_is_named():
    weights = [torch.nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(TrainError, match="wight_decay"):
        optimizers.build("adamw", {"wight_decay": "0.1"}, 1e-3, weights)
    with pytest.raises(TrainError, match="betas=0.9;0.99"):
        optimizers.build("adamw8bit", {"betas": "0.9;0.99"}, 1e-3, weights)


def test_a_schedule_free_lora_has_the_average_and_its_training_goes_on_unchanged():
    weight = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    optimizer = optimizers.build("adamwschedulefree", {}, 0.1, [weight])
    for _ in range(3):
        (weight**2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = weight.detach().clone()
    found = optimizers.averaged(optimizer, {"w": weight})["w"]
    assert torch.equal(weight, before) and optimizer.param_groups[0]["train_mode"]
    optimizer.eval()
    assert torch.equal(found, weight) and not torch.equal(found, before)
