"""What the tables say of each family's memory, from its full-size model on torch's "meta" device, which takes none."""

import functools
import importlib
import re

import pytest
import torch

import presets
from presets import tables
from trainer import imports, lora

imports.heavy()
import diffusers  # noqa: E402 - after `heavy`

AHEAD = 2  # streamed blocks on the GPU at a time
# Bytes of a weight as it is stored, in NF4 with its share of a scale (trainer/quantized.py).
STORED = {"float8": 1.0, "int8": 1.0, "nf4": 0.5 + 4 / 64}
# The configurations that the families' repositories have, as far as they are not the classes' defaults.
SDXL = {
    "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048, "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20), "down_block_types": ("DownBlock2D", *["CrossAttnDownBlock2D"] * 2),
    "up_block_types": (*["CrossAttnUpBlock2D"] * 2, "UpBlock2D"), "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
SD35 = {"joint_attention_dim": 4096, "pooled_projection_dim": 2048, "qk_norm": "rms_norm"}
SD35 |= {"in_channels": 16, "out_channels": 16}
LARGE = {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192}
MEDIUM = {
    "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
}  # fmt: skip
KLEIN_4B = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680}
KLEIN_9B = {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288}
MODELS = {
    "flux-dev": ("flux", "FluxTransformer2DModel", {"guidance_embeds": True}),
    "chroma": ("chroma", "ChromaTransformer2DModel", {}),
    "z-image": ("z_image", "ZImageTransformer2DModel", {}),
    "qwen-image": ("qwen_image", "QwenImageTransformer2DModel", {}),
    "sd35-large": ("sd3", "SD3Transformer2DModel", {**SD35, **LARGE}),
    "sd35-medium": ("sd3", "SD3Transformer2DModel", {**SD35, **MEDIUM}),
    "sdxl": ("sdxl", "UNet2DConditionModel", SDXL),
    "flux2-klein-4b": ("flux2_klein", "Flux2Transformer2DModel", {**KLEIN_4B, "guidance_embeds": False}),
    "flux2-klein-9b": ("flux2_klein", "Flux2Transformer2DModel", {**KLEIN_9B, "guidance_embeds": False}),
}


@functools.cache
def full_size(key: str) -> tuple[int, int, list[tuple[int, int]], int]:
    """Numbers in the layers that get a LoRA, in all others, and both for each block that can stream, in their order;
    the weights of a LoRA of rank 1."""
    name, class_name, config = MODELS[key]
    with torch.device("meta"):
        model = getattr(diffusers, class_name)(**config)
    family = importlib.import_module(f"trainer.families.{name}").FAMILY
    small = {f"{layer}.weight" for layer in lora.layers(model, family.blocks["all"])}

    def count(parameters) -> tuple[int, int]:
        found = [(name in small, one.numel()) for name, one in parameters]
        return sum(size for is_small, size in found if is_small), sum(size for is_small, size in found if not is_small)

    kinds = set(model._no_split_modules or ())
    blocks = [(at, one) for at, one in model.named_modules() if type(one).__name__ in kinds]
    sides = sum(sum(one.shape) for name, one in model.named_parameters() if name in small)
    return *count(model.named_parameters()), [count(one.named_parameters(prefix=at)) for at, one in blocks], sides


def weights_gb(key: str, flags: dict) -> float:
    """Frozen weights on the GPU: the stored ones in fewer bits, the others in 16, without those that stream."""
    small, others, blocks, _ = full_size(key)
    away = blocks[len(blocks) - flags.get("blocks_to_stream", 0) :][AHEAD:]
    small, others = small - sum(one for one, _ in away), others - sum(one for _, one in away)
    kind = flags.get("quantize") or ("float8" if flags.get("fp8_base") else "")
    return (small * STORED.get(kind, 2) + others * 2) / 1e9


@pytest.mark.parametrize("key", MODELS)
def test_the_tables_say_what_the_weights_of_the_model_take_in_each_tier(key):
    said, real = {}, {}
    for tier, row in tables.tiers_of(key, "diffusers").items():
        flags = tables.tier_flags(key, "diffusers", tier)
        if row["problem"] or flags.get("split_mode"):
            continue
        gb = re.search(r"([\d.]+) GB of weights", row["basis"])
        said[tier] = float(gb[1])
        real[tier] = weights_gb(key, flags)
    assert said == pytest.approx(real, abs=0.1)
    table = presets.families()[tables.models()[key]["family"]]
    assert table["lora_sides"] == pytest.approx(full_size(key)[3], rel=0.3)
