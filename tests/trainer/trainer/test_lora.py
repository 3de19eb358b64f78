"""The LoRA: which matrices it is on, at full size too, and what its file says of it."""

import pytest
from flux_parts import arguments, loaded

from trainer import flow, lora
from trainer.families.flux import FAMILY

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("blocks", "layers"), [("double", 2 * 14), ("single", 4 * 6), ("all", 2 * 14 + 4 * 6)])
def test_the_lora_sits_on_every_matrix_of_the_selected_blocks(model, blocks, layers):
    _, parameters = loaded(model, blocks)
    assert len(parameters) == 2 * layers
    assert all(p.requires_grad and p.dtype == torch.float32 for p in parameters.values())


def test_the_complete_flux_dev_takes_a_step_as_shapes():
    """FLUX.1-dev's own sizes on torch's "meta" device: what a test can run of 12 billion parameters."""
    from accelerate import init_empty_weights
    from diffusers import FluxTransformer2DModel

    with init_empty_weights():
        transformer = FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)  # diffusers' defaults are dev's
    assert sum(p.numel() for p in transformer.parameters()) == 11_901_408_320
    lower = {id(p) for name in FAMILY.halves for p in getattr(transformer, name).parameters()}
    assert sum(p.numel() for p in transformer.parameters() if id(p) in lower) == 5_399_565_888
    settings = {"rank": 16, "alpha": 16.0, "dropout": 0.0, "seed": 1, "cast_inputs": True}
    parameters = lora.add(transformer, blocks=FAMILY.blocks["all"], **settings)
    transformer.train().enable_gradient_checkpointing()
    batch = {
        "latents": torch.zeros(1, 16, 64, 64),
        "t5": torch.zeros(1, 512, 4096, dtype=torch.bfloat16),
        "clip": torch.zeros(1, 768, dtype=torch.bfloat16),
    }
    loss = flow.loss_of(arguments(), FAMILY, transformer, batch, 1, torch.device("meta"), torch.bfloat16)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in parameters.values())
    found = {name: tuple(p.shape) for name, p in parameters.items()}
    assert len(found) == 2 * (19 * 14 + 38 * 6)
    for layer, (wide, narrow) in PUBLISHED.items():
        assert found[f"{layer}.lora_A.weight"] == (16, narrow) and found[f"{layer}.lora_B.weight"] == (wide, 16)


# names and shapes of LoRAs that other programs write and read, from sd-scripts' networks/convert_flux_lora.py
PUBLISHED = {
    "transformer_blocks.0.attn.add_k_proj": (3072, 3072),
    "transformer_blocks.0.attn.to_add_out": (3072, 3072),
    "transformer_blocks.18.attn.to_out.0": (3072, 3072),
    "transformer_blocks.18.ff.net.0.proj": (12288, 3072),
    "transformer_blocks.0.ff.net.2": (3072, 12288),
    "transformer_blocks.0.ff_context.net.0.proj": (12288, 3072),
    "transformer_blocks.0.norm1.linear": (18432, 3072),
    "transformer_blocks.0.norm1_context.linear": (18432, 3072),
    "single_transformer_blocks.37.attn.to_k": (3072, 3072),
    "single_transformer_blocks.0.norm.linear": (9216, 3072),
    "single_transformer_blocks.0.proj_mlp": (12288, 3072),
    "single_transformer_blocks.37.proj_out": (3072, 15360),
}


def test_the_lora_file_is_always_the_same_and_describes_itself(model, tmp_path):
    from safetensors import safe_open

    _, parameters = loaded(model, alpha=2.0)
    facts = {"images": [], "batches": 1, "epochs": 1, "steps": 3}
    about = lora.describe(
        arguments(network_alpha=2.0, network_dim=4), FAMILY, architecture="flux-1-dev/lora", epoch=1, step=3, **facts
    )
    data = lora.to_file(parameters, FAMILY.prefix, 2.0 / 4, None, about)
    assert data == lora.to_file(parameters, FAMILY.prefix, 2.0 / 4, None, about)
    (tmp_path / "x.safetensors").write_bytes(data)
    with safe_open(tmp_path / "x.safetensors", "pt") as content:
        assert content.metadata() == about and about["ss_network_dim"] == "4"
        assert len(list(content.keys())) == len(parameters)
