"""A snapshot of kohya's trainers holds what accelerate's save_state writes, each time, whatever the models are."""

import errno
from types import SimpleNamespace
from unittest import mock

import accelerate
import pytest
import torch

from guards.checkpoint import GUARD
from guards.heartbeat import Heartbeat
from guards.snapshot_files import RING, write_state
from sd_scripts_patches import session, snapshots


class Network(torch.nn.Module):
    """A LoRA-like module: nested, with a buffer that is saved and one that is not."""

    def __init__(self, shared=False):
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 4, bias=False))
        self.second = torch.nn.Linear(4, 4)
        self.register_buffer("alpha", torch.tensor(1.0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        if shared:
            self.third = torch.nn.Linear(4, 4)
            self.third.weight = self.second.weight


class Split(Network):
    """As sd-scripts' LoRA of a fused matrix: its state has other tensors than its modules."""

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        name = next(name for name in state if name.endswith("second.weight"))
        state[f"{name}.half"] = state.pop(name)[:2].clone()
        return state


def prepared(network, drop):
    """(accelerator, optimizer) of a network beside a frozen model. drop: with kohya's hook."""
    accelerator = accelerate.Accelerator(cpu=True)
    frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    frozen, network, optimizer = accelerator.prepare(frozen, network, optimizer)
    if drop:

        def hook(models, weights, folder):
            for index in reversed([i for i, model in enumerate(models) if not isinstance(model, Network)]):
                weights.pop(index)

        accelerator.register_save_state_pre_hook(hook)
    return accelerator, optimizer


def train(network, optimizer):
    loss = network.second(network.first(torch.randn(3, 4))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("kind", [Network, lambda: Network(shared=True), Split], ids=["plain", "shared", "split"])
def test_every_capture_holds_what_save_state_writes(tmp_path, kind, drop):
    network = kind()
    accelerator, optimizer = prepared(network, drop)
    for number in range(3):
        train(network, optimizer)
        if number == 2:  # one parameter is another object from now on
            network.first[0].weight = torch.nn.Parameter(network.first[0].weight.detach() + 1)
        written, captured = tmp_path / f"written-{number}", tmp_path / f"captured-{number}"
        accelerator.save_state(str(written))
        files = snapshots.capture(accelerator, tmp_path / "capture")
        write_state(captured, files, 1, 1)
        names = sorted(path.name for path in written.iterdir())
        assert names == sorted(path.name for path in captured.iterdir() if path.name != GUARD)
        assert len([name for name in names if name.endswith(".safetensors")]) == (1 if drop else 2)
        for name in (name for name in names if name.endswith(".safetensors")):
            assert (written / name).read_bytes() == (captured / name).read_bytes(), (number, name)


def test_memory_that_another_program_fills_ends_the_snapshots_and_not_the_training(tmp_path, monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(snapshots, "capture", full)
    monkeypatch.setattr(session, "run", SimpleNamespace(loader=1, epochs_done=0))
    monkeypatch.setenv(RING, str(tmp_path))
    alone = SimpleNamespace(distributed_type="NO")
    ours = snapshots.MemorySnapshots(SimpleNamespace(step=3, losses=[], accelerator=alone, args=None))
    monkeypatch.setattr(snapshots, "saves", snapshots.StateSaves(ours.memory, Heartbeat(None)))
    assert not snapshots.write_later(alone, tmp_path / "x-state", 3, 1), "so it is written at once"
    ours.take_if_due()
    assert "step 3 has no room in memory" in ours.memory.off and full.call_count == 2
