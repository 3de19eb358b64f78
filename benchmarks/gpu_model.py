"""A FLUX.1-dev of full size with random weights, in diffusers' layout: 34 GB, made on the GPU in a minute.

The sizes are those of diffusers' classes (the transformer), of `openai/clip-vit-large-patch14`, of
`google/t5-v1_1-xxl` and of FLUX.1's autoencoder. The tokenizers are the tiny model's.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from trainer import imports, tiny_flux

CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
T5 = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24, "vocab_size": 32128}
VAE = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "norm_num_groups": 32}
SPREAD = 0.02  # of the weights


def make(folder: Path, device: str = "cuda") -> Path:
    """Write the model to `folder`. Takes 24 GB of GPU memory for a while."""
    tiny_flux.make(folder)
    imports.heavy()
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    clip, t5 = (
        Class.from_pretrained(folder / part)
        for Class, part in ((CLIPTextConfig, "text_encoder"), (T5Config, "text_encoder_2"))
    )
    clip.update({**CLIP, "projection_dim": 768, "vocab_size": 49408})
    t5.update(T5)
    parts = {
        "transformer": lambda: FluxTransformer2DModel(guidance_embeds=True),
        "vae": lambda: AutoencoderKL(**{**tiny_flux.VAE, **VAE}),
        "text_encoder": lambda: CLIPTextModel(clip),
        "text_encoder_2": lambda: T5EncoderModel(t5),
    }
    for part, build in parts.items():
        write(folder / part, build, device)
    return folder


def write(folder: Path, build: Any, device: str) -> None:
    """One part, in bfloat16, in place of the tiny one."""
    import torch
    from accelerate import init_empty_weights
    from safetensors.torch import save_file

    with init_empty_weights():
        model = build().to(torch.bfloat16)
    stem = next(folder.glob("*.safetensors")).name
    shutil.rmtree(folder)
    (getattr(model, "save_config", None) or model.config.save_pretrained)(folder)
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, parameter in model.named_parameters():
        made = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        if made.dim() > 1:
            made.normal_(std=SPREAD, generator=generator)
        else:
            made.fill_(float(name.endswith("weight")))
        tensors[name] = made
    save_file(tensors, folder / stem, metadata={"format": "pt"})
    del tensors
    torch.cuda.empty_cache()
