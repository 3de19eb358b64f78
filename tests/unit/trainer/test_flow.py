"""The loss: nothing for a prediction of exactly the noise, whatever its level and the options that choose it."""

from types import SimpleNamespace

import pytest
import torch
from trainer_helpers import flags

from trainer import flow
from trainer.arguments import parse

LATENTS = torch.linspace(-1, 1, 2 * 4 * 8 * 8).view(2, 4, 8, 8)


def loss(args, predict) -> float:
    family = SimpleNamespace(loss=None, patch=2, predict=predict)
    return flow.loss_of(args, family, None, {"latents": LATENTS}, 7, "cpu", torch.float32).item()


@pytest.mark.parametrize("kind", ["l2", "l1", "huber", "smooth_l1"])
@pytest.mark.parametrize("sampling", ["uniform", "sigma", "sigmoid", "shift", "flux_shift"])
def test_a_perfect_prediction_has_no_loss_and_a_worse_one_has(kind, sampling):
    args = parse(flags("m", "d", "o", loss_type=kind, timestep_sampling=sampling))
    noise = flow.begin({"latents": LATENTS}, 7, "cpu")[1]
    levels = []

    def perfect(model, noisy, level, texts, args):
        levels.append(level)
        assert torch.allclose(noisy, LATENTS + level.view(-1, 1, 1, 1) * (noise - LATENTS), atol=1e-5)
        return noise - LATENTS

    assert loss(args, perfect) == 0 and loss(args, perfect) == 0
    assert torch.equal(*levels) and (levels[0] > 0).all() and (levels[0] <= 1).all()
    worse = loss(args, lambda *given: perfect(*given) + 0.1)
    assert 0 < worse < loss(args, lambda *given: perfect(*given) + 0.2)
