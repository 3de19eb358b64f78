"""The file that holds the state of the training loop."""

import enum
import json
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from accelerate.utils.other import load

from sd_scripts_patches import legacy_state, resume, trainer_state


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


class Norm(enum.Enum):
    SIGN = 1


class Optimizer(torch.optim.SGD):
    """As ProdigyPlus with several groups, or SCION."""

    mean = None

    def step(self):
        self.mean, self.param_groups[0]["norm"] = (self.mean or 0) + 0.1, Norm.SIGN


def test_an_optimizer_resumes_with_its_numbers_beside_its_state_and_the_objects_of_its_library(tmp_path):
    """Else the first step after a kill had another learning rate, or no state could be loaded and all work was lost.

    The gradients of a weight that is not trained are never cleared, and count when those of all weights are clipped.
    LoRA-GGPO perturbs a step by the norms of the one before."""
    networks, layers = [], []

    def made():
        networks.append(torch.nn.ParameterList([torch.zeros(1), torch.zeros(1)]))
        optimizer, run = Optimizer([networks[-1][0]], lr=1.0), resume.Run()
        optimizer.optimizer, optimizer.fused = optimizer, True  # as accelerate wraps it; a setting, which stays
        add = lambda hook: None  # noqa: E731
        adds = {"register_load_state_pre_hook": add, "register_save_state_pre_hook": add}
        perturbed = torch.nn.Identity()  # a layer of LoRA-GGPO
        vars(perturbed).update(dict.fromkeys(trainer_state.NORMS), device="cpu")
        models = [torch.nn.Linear(1, 1), networks[-1], perturbed]
        layers.append(perturbed)
        run.register_hooks(SimpleNamespace(_optimizers=[optimizer], _models=models, **adds))
        return optimizer, run

    (before, run), (after, resumed) = made(), made()
    before.step()
    counts = dict.fromkeys(("step", "epoch", "batch", "batches", "accumulation", "processes", "workers"), 1)
    extra = {"numbers": run._numbers()}
    assert extra == {"numbers": [{"mean": 0.1}]}
    trainer_state.write(tmp_path, trainer_state.TrainerState(**counts, epoch_over=False, extra=extra))
    torch.save(before.state_dict(), tmp_path / "optimizer.bin")
    networks[0][1].grad = torch.ones(1)
    layers[0].grad_norms = torch.ones(2)
    trainer_state.write_beside(tmp_path, run.beside)
    resumed._load(tmp_path)
    assert [weight.grad for weight in networks[1]] == [None, torch.ones(1)]
    assert layers[1].grad_norms.tolist() == [1, 1] and layers[1].combined_weight_norms is None
    other = torch.zeros(2)
    trainer_state.read_beside(tmp_path, [(other, "grad"), *run.beside[1:]])
    assert other.grad is None, "the settings have changed which weights are trained"
    after.load_state_dict(load(tmp_path / "optimizer.bin"))
    assert (after.mean, after.param_groups[0]["norm"]) == (0.1, Norm.SIGN)
