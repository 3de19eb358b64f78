"""The tiny FLUX in the test's own process: its transformer with a LoRA, a batch, and a few optimizer steps."""

import pytest
from trainer_helpers import flags

from trainer import families, flow, imports, lora, models
from trainer.arguments import parse
from trainer.families.flux import FAMILY

torch = pytest.importorskip("torch")
imports.heavy()
CPU = torch.device("cpu")
no_tick = lambda done, total: None  # noqa: E731


def arguments(**changed):
    args = parse(flags("m", "d", "o", **changed))
    args.t5_tokens = 16
    return args


def load(model, kind=""):
    """The part of a model, of any family, that is trained."""
    return models.load_denoiser(model, families.of(model), torch.float32, CPU, kind, no_tick)


def loss_of(args, transformer, batch, seed):
    return flow.loss_of(args, FAMILY, transformer, batch, seed, CPU, torch.float32)


def loaded(model, blocks="all", kind="", **lora_changed):
    transformer = load(model, kind)
    settings = {"rank": 4, "alpha": 1.0, "dropout": 0.0, "seed": 42, "cast_inputs": True, **lora_changed}
    return transformer, lora.add(transformer, blocks=families.of(model).blocks[blocks], **settings)


def a_batch(count=2, height=8, width=12):
    draw = torch.Generator().manual_seed(1)
    return {
        "latents": torch.randn(count, 16, height, width, generator=draw),
        "t5": torch.randn(count, 16, 64, generator=draw),
        "clip": torch.randn(count, 32, generator=draw),
        "mask": torch.ones(count, 16, dtype=torch.long),
    }


def steps(transformer, parameters, args, count=3):
    """`count` optimizer steps on one batch → their losses."""
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    out = []
    for step in range(count):
        loss = loss_of(args, transformer, a_batch(), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out
