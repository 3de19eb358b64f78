"""The loss of a micro-batch: noise, timestep, prediction, loss, with the options and formulas of sd-scripts.

Random numbers are drawn on the CPU from generators seeded with (seed, step, micro-batch, rank), so a step is the same on
any machine. Shapes: latents [batch, 16, h/8, w/8]; packed [batch, h/16*w/16, 64].
"""

import contextlib
import math
from collections.abc import Iterator

import torch

TRAIN_TIMESTEPS = 1000


def shift_sigmas(sigmas: torch.Tensor, shift: float) -> torch.Tensor:
    return sigmas * shift / (1 + (shift - 1) * sigmas)


def resolution_mu(tokens: int) -> float:
    """FLUX.1's time shift for an image with `tokens` packed tokens (0.5 at 256, 1.15 at 4096)."""
    return 0.5 + (tokens - 256) * (1.15 - 0.5) / (4096 - 256)


def density(args, batch: int, generator: torch.Generator) -> torch.Tensor:
    """Positions in the schedule, in [0, 1), by the weighting schemes of the SD3 paper (arXiv:2403.03206)."""
    if args.weighting_scheme == "logit_normal":
        return torch.sigmoid(torch.randn(batch, generator=generator) * args.logit_std + args.logit_mean)
    u = torch.rand(batch, generator=generator)
    if args.weighting_scheme == "mode":
        u = 1 - u - args.mode_scale * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)
    return u


def draw_sigmas(args, batch: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """One noise level per image, in (0, 1], float32 on the CPU."""
    how = args.timestep_sampling
    if how == "uniform":
        return torch.rand(batch, generator=generator)
    if how == "sigma":
        steps = torch.linspace(1, TRAIN_TIMESTEPS, TRAIN_TIMESTEPS).flip(0) / TRAIN_TIMESTEPS
        index = (density(args, batch, generator) * TRAIN_TIMESTEPS).long().clamp(0, TRAIN_TIMESTEPS - 1)
        return shift_sigmas(steps, args.discrete_flow_shift)[index]
    sigmas = torch.sigmoid(args.sigmoid_scale * torch.randn(batch, generator=generator))
    if how == "shift":
        return shift_sigmas(sigmas, args.discrete_flow_shift)
    if how == "flux_shift":
        return shift_sigmas(sigmas, math.exp(resolution_mu(tokens)))
    return sigmas


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[b, c, h, w] → [b, h/2*w/2, c*4]: 2x2 patches as tokens."""
    b, c, h, w = latents.shape
    return latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h // 2 * (w // 2), c * 4)


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `pack`; height and width of the latents."""
    b, _, c = tokens.shape
    return (
        tokens.view(b, height // 2, width // 2, c // 4, 2, 2)
        .permute(0, 3, 1, 4, 2, 5)
        .reshape(b, c // 4, height, width)
    )


def image_ids(height: int, width: int, device) -> torch.Tensor:
    """Row and column of each packed token: [tokens, 3], the first column 0."""
    ids = torch.zeros(height // 2, width // 2, 3, device=device)
    ids[..., 1] += torch.arange(height // 2, device=device)[:, None]
    ids[..., 2] += torch.arange(width // 2, device=device)[None, :]
    return ids.reshape(-1, 3)


def attention_mask(text_mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """For --apply_t5_attn_mask: [b, text] of 0/1 → [b, 1, 1, text + image], True where attention is allowed."""
    image = torch.ones(text_mask.shape[0], tokens, dtype=torch.bool, device=text_mask.device)
    return torch.cat([text_mask.bool(), image], dim=1)[:, None, None, :]


def loss_of(
    args, transformer, batch: dict, seed: int, device, dtype, sigmas: torch.Tensor | None = None
) -> torch.Tensor:
    """The loss of one micro-batch, a scalar with gradients. sigmas: the noise level of each image; None draws them."""
    latents = batch["latents"].to(device=device, dtype=torch.float32)
    count, _, height, width = latents.shape
    tokens = height // 2 * (width // 2)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(latents.shape, generator=generator).to(device)
    sigmas = (draw_sigmas(args, count, tokens, generator) if sigmas is None else sigmas).to(device)
    level = sigmas.view(-1, 1, 1, 1)
    noisy = (1 - level) * latents + level * noise
    guidance = None
    if transformer.config.guidance_embeds:
        guidance = torch.full((count,), float(args.guidance_scale), device=device, dtype=dtype)
    text = batch["t5"].to(device=device, dtype=dtype)
    extra = {}
    if args.apply_t5_attn_mask:
        extra["attention_mask"] = attention_mask(batch["mask"].to(device), tokens)
    predicted = transformer(
        hidden_states=pack(noisy.to(dtype)),
        encoder_hidden_states=text,
        pooled_projections=batch["clip"].to(device=device, dtype=dtype),
        timestep=sigmas.to(dtype),
        img_ids=image_ids(height, width, device),
        txt_ids=torch.zeros(text.shape[1], 3, device=device),
        guidance=guidance,
        joint_attention_kwargs=extra,
        return_dict=False,
    )[0]
    predicted = unpack(predicted, height, width).float()
    weight = None
    if args.model_prediction_type == "additive":
        predicted = predicted + noisy
    elif args.model_prediction_type == "sigma_scaled":
        predicted = predicted * -level + noisy
        weight = weighting(args, level)
    loss = pointwise(args, predicted, noise - latents, sigmas)
    loss = loss if weight is None else loss * weight
    if "loss_mask" in batch:  # the mean counts the ignored part too, as in sd-scripts
        loss = loss * batch["loss_mask"].to(device=device, dtype=loss.dtype)[:, None]
    return loss.mean(dim=(1, 2, 3)).mean()


def weighting(args, level: torch.Tensor) -> torch.Tensor | None:
    if args.weighting_scheme == "sigma_sqrt":
        return level**-2.0
    if args.weighting_scheme == "cosmap":
        return 2 / (math.pi * (1 - 2 * level + 2 * level**2))
    return None


def pointwise(args, predicted: torch.Tensor, target: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    difference = predicted - target
    if args.loss_type == "l2":
        return difference**2
    if args.loss_type == "l1":
        return difference.abs()
    if args.huber_schedule == "exponential":
        c = torch.exp(math.log(args.huber_c) * sigmas) * args.huber_scale
    else:
        c = torch.full_like(sigmas, args.huber_c * args.huber_scale)
    c = c.view(-1, 1, 1, 1)
    curve = torch.sqrt(difference**2 + c**2) - c
    return 2 * c * curve if args.loss_type == "huber" else 2 * curve


@contextlib.contextmanager
def evaluating(transformer) -> Iterator[None]:
    """In the block the transformer is evaluated, not trained; its modes are as before afterwards, also after an error."""
    recompute, transformer.gradient_checkpointing = transformer.gradient_checkpointing, False
    training = transformer.training
    transformer.eval()
    try:
        yield
    finally:
        transformer.gradient_checkpointing = recompute
        transformer.train(training)
