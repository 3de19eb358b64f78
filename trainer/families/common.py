"""What several families share: the scale of latents, 2x2 patches of them as tokens, the arguments of a pipeline."""

from collections.abc import Callable
from typing import Any

import torch


def scaled(vae, picture: torch.Tensor) -> torch.Tensor:
    """The mean of the VAE's distribution, shifted and scaled: the latents of most families, in float32."""
    mean = vae.encode(picture.to(vae.dtype)).latent_dist.mode().float()
    return (mean - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[b, c, h, w] → [b, h/2*w/2, c*4]: 2x2 patches as tokens."""
    return torch.pixel_unshuffle(latents, 2).flatten(2).mT.contiguous()


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `pack`; height and width of the latents."""
    return torch.pixel_shuffle(tokens.mT.unflatten(2, (height // 2, width // 2)), 2).contiguous()


def image_ids(height: int, width: int, device) -> torch.Tensor:
    """Row and column of each packed token: [tokens, 3], the first column 0."""
    sides = (1, height // 2, width // 2)
    return torch.cartesian_prod(*(torch.arange(side, dtype=torch.float32, device=device) for side in sides))


def with_image(text_mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """[b, text] of 0 and 1 → [b, text + image], True where attention is allowed."""
    image = torch.ones(text_mask.shape[0], tokens, dtype=torch.bool, device=text_mask.device)
    return torch.cat([text_mask.bool(), image], dim=1)


def sampling(scale: str, **names: str) -> Callable[[dict, dict | None, Any, Any], dict]:
    """`Family.sample` of a pipeline that takes texts as tensors. scale: its argument for the strength of the guidance;
    names: argument → tensor; a negative text goes to the same arguments, with `negative_` before them."""

    def sample(text: dict, without: dict | None, prompt, args) -> dict:
        found = {argument: text[name] for argument, name in names.items()}
        if without is not None:
            found |= {f"negative_{argument}": without[name] for argument, name in names.items()}
        return {**found, scale: prompt.cfg if without is not None else 1.0}

    return sample
