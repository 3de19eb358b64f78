"""FLUX.2 [klein]. Its latents are patches already: the VAE's 2x2 neighbours are channels, normalised."""

import torch

from trainer.families import Family
from trainer.families.common import sampling
from trainer.families.flux import FAMILY as FLUX


def encode(pipe, text: str, args) -> dict:
    """States of three of Qwen3's layers, side by side [tokens, 3 × width]."""
    return {"text": pipe.encode_prompt(text)[0][0]}


def latents(vae, picture: torch.Tensor) -> torch.Tensor:
    """[1, 4 × channels, height/2, width/2]: 2x2 patches, normalised by the statistics of the VAE."""
    from diffusers import Flux2KleinPipeline

    patches = Flux2KleinPipeline._patchify_latents(vae.encode(picture.to(vae.dtype)).latent_dist.mode()).float()
    mean = vae.bn.running_mean.view(1, -1, 1, 1).float()
    deviation = (vae.bn.running_var.view(1, -1, 1, 1).float() + vae.config.batch_norm_eps).sqrt()
    return (patches - mean) / deviation


def predict(model, noisy: torch.Tensor, level: torch.Tensor, batch: dict, args) -> torch.Tensor:
    from diffusers import Flux2KleinPipeline as Pipeline

    count, channels, height, width = noisy.shape
    text = batch["text"]
    predicted = model(
        hidden_states=Pipeline._pack_latents(noisy.to(text.dtype)),
        timestep=level.to(text.dtype),
        encoder_hidden_states=text,
        txt_ids=Pipeline._prepare_text_ids(text).to(noisy.device),
        img_ids=Pipeline._prepare_latent_ids(noisy).to(noisy.device),
        guidance=None,
        return_dict=False,
    )[0]
    return predicted.float().permute(0, 2, 1).reshape(count, channels, height, width)


FAMILY = Family(
    key="flux2_klein",
    name="FLUX.2 klein",
    blocks=FLUX.blocks,
    encode=encode,
    predict=predict,
    sample=sampling("guidance_scale", prompt_embeds="text"),
    latents=latents,
    architecture=lambda config: "flux-2-klein/lora",
    tokens=512 - 12,
    guidance_is_cfg=True,
    patch=1,
    halves=FLUX.halves,
)
