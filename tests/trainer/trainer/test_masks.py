"""What a mask does to real training with the built-in trainer.

A learning rate that changes no weight makes the losses of two runs comparable step by step: below a black mask the loss is
exactly 0, with a white one it is that of the image without a mask, and with half a mask it is that of the other half.
"""

import json
import re
from pathlib import Path

import pytest
from mask_helpers import EPOCHS, NO_LEARNING, check, mask_images
from trainer_helpers import flags, fork, good, make_config, make_images

from trainer import flow, tiny_flux


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_flux.ensure(tmp_path_factory.mktemp("model") / "tiny-flux")


def with_masks(config: Path) -> Path:
    config.write_text(config.read_text(encoding="utf-8") + "alpha_mask = true\n", encoding="utf-8")
    return config


def losses_of(model: Path, config: Path, output: Path, **changed) -> list[float]:
    run = output.with_name(f"{output.name}-run")
    run.mkdir()
    settings = {"max_train_steps": None, "max_train_epochs": EPOCHS, "learning_rate": NO_LEARNING, **changed}
    good(fork(flags(model, config, output, **settings), HANGPROOF_RUN=str(run)))
    rows = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(row)["loss"] for row in rows]


def test_the_built_in_trainer_leaves_the_ignored_part_out_of_its_loss(model, tmp_path):
    images = make_images(tmp_path / "images")
    plain = make_config(tmp_path / "plain.toml", images, repeats=1)
    config = with_masks(make_config(tmp_path / "masked.toml", images, repeats=1))
    whole = losses_of(model, plain, tmp_path / "whole")
    mask_images(images)
    masked = losses_of(model, config, tmp_path / "masked")
    check(whole, masked, 5)
    cached = {path: path.stat().st_mtime_ns for path in images.glob(".hangproof-cache/latents-*")}
    assert losses_of(model, config, tmp_path / "again") == masked  # from the cache, which has the masks
    assert {path: path.stat().st_mtime_ns for path in images.glob(".hangproof-cache/latents-*")} == cached
    paired = losses_of(model, with_masks(make_config(tmp_path / "three.toml", images, 1, 3)), tmp_path / "three")
    assert (
        paired.count(0) == EPOCHS
    )  # the third image is a batch of its own, the first is in one with two that are trained


def test_a_run_of_ignored_images_learns_nothing(model, tmp_path):
    from safetensors.torch import load_file

    images = make_images(tmp_path / "images", 1)
    mask_images(images)
    for name, config in (
        ("masked", with_masks(make_config(tmp_path / "masked.toml", images))),
        ("plain", make_config(tmp_path / "plain.toml", images)),
    ):
        found = losses_of(model, config, tmp_path / name, learning_rate=1e-2)
        trained = load_file(tmp_path / name / "tiny.safetensors")
        changed = any(weight.abs().max() > 0 for key, weight in trained.items() if re.search(r"lora_B|lora_up", key))
        assert changed == (name == "plain") and any(found) == (name == "plain")


def test_the_loss_depends_on_the_trained_part_only():
    """With a model whose prediction does not depend on its input: what is below the mask changes nothing, the rest does."""
    import torch

    from trainer.arguments import parse

    class Constant(torch.nn.Module):
        class config:
            guidance_embeds = False

        def forward(self, hidden_states, **_):
            return (torch.zeros_like(hidden_states),)

    args = parse(flags("m", "d", "o"))
    draw = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 8, 8)
    mask[0, :, 4:] = 0
    mask[1] = 0.25
    batch = {
        "latents": torch.randn(2, 16, 8, 8, generator=draw),
        "t5": torch.zeros(2, 4, 8),
        "clip": torch.zeros(2, 8),
        "mask": torch.ones(2, 4),
    }

    def loss(latents, **more):
        given = {**batch, "latents": latents, **more}
        return flow.loss_of(args, Constant(), given, 5, torch.device("cpu"), torch.float32)

    latents = batch["latents"]
    base = loss(latents, loss_mask=mask)
    below, beside = latents.clone(), latents.clone()
    below[0, :, :, 4:] += 3
    beside[0, :, :, :4] += 3
    assert loss(below, loss_mask=mask) == base and loss(beside, loss_mask=mask) != base
    assert loss(latents, loss_mask=torch.ones(2, 8, 8)) == loss(latents) > base > 0
    halves = loss(latents, loss_mask=mask * torch.tensor([1.0, 0]).view(2, 1, 1))
    rest = loss(latents, loss_mask=mask * torch.tensor([0, 1.0]).view(2, 1, 1))
    assert float(halves + rest) == pytest.approx(float(base), rel=1e-6)
