"""Halves and blocks that are brought to the GPU when they are needed train the same."""

import pytest
import torch
from flux_parts import CPU, arguments, loaded, steps

from trainer import streaming
from trainer.families.flux import FAMILY

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("recompute", [False, True])
def test_split_mode_trains_what_plain_training_of_the_single_blocks_trains(model, recompute):
    args, results = arguments(), []
    for halves in (False, True):
        transformer, parameters = loaded(model, "single")
        if recompute:
            transformer.enable_gradient_checkpointing()
        if halves:
            streaming.split(transformer, FAMILY.halves, CPU)
        results.append((steps(transformer, parameters, args, 4), parameters))
    (plain, weights), (halved, others) = results
    assert plain == pytest.approx(halved, abs=1e-6)
    assert max((weights[name] - others[name]).abs().max().item() for name in weights) <= 1e-6
    assert any(weights[name].abs().max() > 0 for name in weights if "lora_B" in name)


ELSEWHERE = torch.device("cpu", 0)  # torch holds it for another device than "cpu": what is brought there is a copy


def away(streamer):
    """The groups whose weights are in their home."""
    pairs = enumerate(zip(streamer.parts, streamer.home, strict=True))
    return [n for n, (parts, home) in pairs if [p.data_ptr() for p in parts] == [h.data_ptr() for h in home]]


def test_a_step_brings_each_half_once_and_one_at_a_time(model, monkeypatch):
    transformer, parameters = loaded(model, "single")
    original = {name: p.clone() for name, p in transformer.named_parameters() if "lora_" not in name}
    streamer = streaming.split(transformer, FAMILY.halves, ELSEWHERE)
    assert away(streamer) == [0, 1]
    brought, real = [], streaming.Streamer.bring

    def bring(self, half):
        real(self, half)
        brought.append((half, away(self)))

    monkeypatch.setattr(streaming.Streamer, "bring", bring)
    steps(transformer, parameters, arguments(), 2)
    assert brought == [(0, [1]), (1, [0])] * 2
    frozen = {id(p) for p in transformer.parameters() if not p.requires_grad}
    assert {id(p) for parts in streamer.parts for p in parts} == frozen
    assert all(torch.equal(p, original[name]) for name, p in transformer.named_parameters() if name in original)


@pytest.mark.parametrize("kind", ["", "nf4"])
def test_streamed_blocks_train_the_same_and_two_of_them_are_there_at_a_time(model, monkeypatch, kind):
    args, results = arguments(), []
    here, real = [], streaming.Streamer.enter

    def enter(self, number):
        real(self, number)
        here.append(len(self.parts) - len(away(self)))

    monkeypatch.setattr(streaming.Streamer, "enter", enter)
    for count in (0, 5):
        transformer, parameters = loaded(model, kind=kind)
        transformer.train().enable_gradient_checkpointing()
        if count:
            streaming.blocks(transformer, count, ELSEWHERE)
        results.append((steps(transformer, parameters, args), parameters))
    (plain, weights), (streamed, others) = results
    assert plain == streamed and all(torch.equal(weights[name], others[name]) for name in weights)
    assert max(here) == 2 and len(here) == 3 * 2 * 5  # each block in forward, and again in backward
