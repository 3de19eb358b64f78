"""`--split_mode` without a training: what it refuses, and which half is on the device."""

import argparse
from types import SimpleNamespace

import pytest
import torch

from sd_scripts_patches import split_mode

FINE = {"blocks_to_swap": None, "cpu_offload_checkpointing": False, "network_args": ["train_blocks=single"]}
FINE |= {"network_train_unet_only": True, "model_type": "flux"}


def conflicts(**changed):
    """The beginnings of the lines, which name the flags."""
    lines = split_mode.conflicts(argparse.Namespace(**{**FINE, **changed}))
    return [line.partition(":")[0].partition(" in --network_args")[0] for line in lines]


def test_each_conflict_names_its_flag_and_supported_flags_are_accepted():
    assert conflicts() == conflicts(blocks_to_swap=0) == []
    assert conflicts(network_args=None) == ["no train_blocks"]
    assert conflicts(network_args=["train_blocks=all"]) == ["train_blocks=all"]
    assert conflicts(network_args=["train_blocks=single", "in_dims=[4,0,0,0,0]"]) == ["in_dims"]
    assert conflicts(network_train_unet_only=False) == ["the text encoders get no gradient"]
    assert conflicts(model_type="chroma") == ["--model_type chroma"]
    flags = {"blocks_to_swap": 18, "cpu_offload_checkpointing": True, "deepspeed": True, "torch_compile": True}
    assert conflicts(**flags) == [f"--{flag}" for flag in flags]
    given = argparse.Namespace(**FINE, split_mode=True)
    begin = split_mode._assert_extra_args(lambda trainer, args: args.split_mode)
    assert begin(None, given) is False and given.split_mode, "sd-scripts would swap blocks"
    given.blocks_to_swap = 2
    with pytest.raises(split_mode.SplitModeError, match="--split_mode does not support these arguments:\n  --blocks"):
        begin(None, given)


@pytest.fixture
def toy():
    """A model with Flux's parts in order, and a LoRA-like adapter on its single block; (model, adapter, input)."""

    class Toy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.img_in = torch.nn.Linear(4, 8)
            self.double_blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
            self.single_blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
            self.final_layer = torch.nn.Linear(8, 4)

        def forward(self, x):
            x = self.img_in(x)
            for block in [*self.double_blocks, *self.single_blocks]:
                x = torch.tanh(block(x))
            return self.final_layer(x)

    torch.manual_seed(0)
    model = Toy().requires_grad_(False)
    adapter = torch.nn.Linear(8, 8, bias=False)
    plain = model.single_blocks[0].forward
    model.single_blocks[0].forward = lambda x: plain(x) + adapter(x)
    return model, adapter, torch.randn(3, 4)


def fake_device(monkeypatch):
    """A device that is not the CPU and whose tensors are copies, so that moves are real."""
    monkeypatch.setattr(split_mode, "_upload", lambda host, device: host.clone())
    return SimpleNamespace(type="fake")


def test_the_halves_alternate_and_the_gradients_are_right(toy, monkeypatch):
    model, adapter, x = toy
    model(x).square().sum().backward()
    expected, adapter.weight.grad = adapter.weight.grad, None
    hosts = [p.data_ptr() for p in model.parameters()]
    halves = split_mode.split(model, fake_device(monkeypatch))
    seen = []
    away = lambda: [p.nbytes for p, host in zip(model.parameters(), hosts, strict=True) if p.data_ptr() != host]  # noqa: E731
    see = lambda *_: seen.append((halves.present, sum(away()), torch.is_grad_enabled()))  # noqa: E731
    for block in (model.double_blocks[1], model.single_blocks[1]):
        block.register_forward_pre_hook(see)
    for _ in range(3):
        model(x).square().sum().backward()
        assert torch.equal(adapter.weight.grad, expected)
        adapter.weight.grad = None
    assert seen == [("first", halves.bytes["first"], False), ("second", halves.bytes["second"], True)] * 3
    assert halves.peak_bytes == max(halves.bytes.values()) < halves.total_bytes == sum(halves.bytes.values())
    moved = [p.data_ptr() != host for p, host in zip(model.parameters(), hosts, strict=True)]
    names = [name.split(".")[0] in split_mode.SECOND_HALF for name, _ in model.named_parameters()]
    assert moved == names  # the single blocks stay on the device until the next step, the others are back on the host


def test_a_lora_in_the_first_half_is_refused(toy, monkeypatch):
    model, _, _ = toy
    model.img_in.forward = model.img_in.forward
    with pytest.raises(split_mode.SplitModeError, match="1 layers of the half that runs without gradients .*img_in"):
        split_mode.split(model, fake_device(monkeypatch))
