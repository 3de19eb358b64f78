"""N processes draw the random numbers of one process, batch by batch."""

import random
from types import SimpleNamespace

import numpy
import pytest
import torch

from sd_scripts_patches import batch_seeds


@pytest.fixture
def loader(monkeypatch):
    """A loader of five batches, with a generator of its own, as accelerate makes it for several processes."""
    monkeypatch.setattr(batch_seeds, "_batches", 0)
    monkeypatch.setattr(batch_seeds, "_repeated", False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    return torch.utils.data.DataLoader(range(10), batch_size=2, shuffle=True, generator=torch.Generator())


def epoch(loader, processes: int) -> list[tuple]:
    """What all processes draw for each batch of an epoch, in the order of the batches."""
    batch_seeds.begin_training(loader)
    drawn = {}
    for rank in range(processes):
        batch_seeds.begin_epoch(7, 0)
        order = float(torch.rand(()))
        for batch in range(-(-5 // processes)):
            batch_seeds.begin_batch(7, 0, batch, SimpleNamespace(num_processes=processes, process_index=rank))
            if not batch_seeds.repeated():
                noise = random.random(), float(numpy.random.normal()), float(torch.rand(()))
                drawn[batch * processes + rank] = order, *noise
    return [drawn[number] for number in sorted(drawn)]


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_draw_for_each_batch_what_one_draws_and_train_none_twice(loader, monkeypatch, processes):
    monkeypatch.setenv("HANGPROOF_BATCH_SEEDS", "1")
    one = epoch(loader, 1)
    assert len(one) == len(set(one)) == 5 and loader.sampler.generator is None
    monkeypatch.setenv("HANGPROOF_BATCH_SEEDS", "")
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert epoch(loader, processes) == one


def test_one_process_keeps_the_stream_of_its_trainer(loader):
    torch.manual_seed(3)
    stream = [float(torch.rand(())) for _ in range(6)]
    torch.manual_seed(3)
    drawn = epoch(loader, 1)
    assert [drawn[0][0], *(noise[-1] for noise in drawn)] == stream and loader.sampler.generator is not None
