"""Qwen-Image. Its VAE is one of videos (an image is one frame), with a mean and a deviation for each channel."""

import torch

from trainer.families import Family
from trainer.families.common import pack, sampling, unpack


def encode(pipe, text: str, args) -> dict:
    """States [tokens, width] of the text behind the template; the mask is all ones."""
    states, _ = pipe.encode_prompt(text)
    return {"text": states[0], "mask": torch.ones(states.shape[1], dtype=torch.long)}


def latents(vae, picture: torch.Tensor) -> torch.Tensor:
    """Latents normalised by the mean and deviation of each channel."""
    mean = vae.encode(picture.to(vae.dtype)[:, :, None]).latent_dist.mode()[:, :, 0].float()
    middle, deviation = (
        torch.tensor(value, device=mean.device).view(1, -1, 1, 1)
        for value in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (mean - middle) / deviation


def predict(model, noisy: torch.Tensor, level: torch.Tensor, batch: dict, args) -> torch.Tensor:
    count, _, height, width = noisy.shape
    dtype, mask = batch["text"].dtype, batch["mask"]
    predicted = model(
        hidden_states=pack(noisy.to(dtype)),
        timestep=level.to(dtype),
        encoder_hidden_states=batch["text"],
        encoder_hidden_states_mask=None if mask.all() else mask,
        img_shapes=[[(1, height // 2, width // 2)]] * count,
        return_dict=False,
    )[0]
    return unpack(predicted, height, width).float()


FAMILY = Family(
    key="qwen_image",
    name="Qwen-Image",
    blocks={"all": r"transformer_blocks\."},
    encode=encode,
    predict=predict,
    sample=sampling("true_cfg_scale", prompt_embeds="text", prompt_embeds_mask="mask"),
    latents=latents,
    architecture=lambda config: "qwen-image/lora",
    tokens=1024 - 5,
)
