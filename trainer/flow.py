"""The loss of a micro-batch: noise, noise level, prediction, loss, with the options and formulas of sd-scripts.

Random numbers are drawn on the CPU from generators seeded with (seed, step, micro-batch, rank), so a step is the same
on any machine. What a family predicts, and how, is in families/.
"""

import math

import torch

TRAIN_TIMESTEPS = 1000


def shift_sigmas(sigmas: torch.Tensor, shift: float) -> torch.Tensor:
    """Noise levels, moved towards more noise by a shift above 1 (SD3, arXiv:2403.03206, equation 23)."""
    return sigmas * shift / (1 + (shift - 1) * sigmas)


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
        mu = 0.5 + (tokens - 256) * (1.15 - 0.5) / (4096 - 256)  # FLUX.1's: 0.5 at 256 packed tokens, 1.15 at 4096
        return shift_sigmas(sigmas, math.exp(mu))
    return sigmas


def begin(batch: dict, seed: int, device) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    """The latents of a micro-batch in float32, its noise, and the generator of all that is drawn for it."""
    latents = batch["latents"].to(device=device, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    return latents, torch.randn(latents.shape, generator=generator).to(device), generator


def on_device(batch: dict, device, dtype) -> dict:
    """The texts of a batch on the device: numbers in `dtype`, masks as they are."""
    return {
        key: value.to(device, dtype if value.is_floating_point() else None)
        for key, value in batch.items()
        if key not in ("latents", "loss_mask")
    }


def loss_of(args, family, model, batch: dict, seed: int, device, dtype, level: float | None = None) -> torch.Tensor:
    """The loss of one micro-batch, a scalar with gradients. level: the noise of all images; None draws one for each."""
    if family.loss is not None:
        return family.loss(args, family, model, batch, seed, device, dtype, level)
    latents, noise, generator = begin(batch, seed, device)
    count, _, height, width = latents.shape
    tokens = height // family.patch * (width // family.patch)
    sigmas = draw_sigmas(args, count, tokens, generator) if level is None else torch.full((count,), level)
    sigmas = sigmas.to(device)
    at = sigmas.view(-1, 1, 1, 1)
    noisy = (1 - at) * latents + at * noise
    predicted = family.predict(model, noisy, sigmas, on_device(batch, device, dtype), args)
    weight = None
    if args.model_prediction_type == "additive":
        predicted = predicted + noisy
    elif args.model_prediction_type == "sigma_scaled":
        predicted = predicted * -at + noisy
        weight = weighting(args, at)
    loss = pointwise(args, predicted, noise - latents, threshold(args, at))
    return mean(loss if weight is None else loss * weight, batch)


def mean(loss: torch.Tensor, batch: dict) -> torch.Tensor:
    """The mean over images; the ignored part of a masked image counts too, as in sd-scripts."""
    if "loss_mask" in batch:
        loss = loss * batch["loss_mask"].to(device=loss.device, dtype=loss.dtype)[:, None]
    return loss.mean(dim=(1, 2, 3)).mean()


def weighting(args, level: torch.Tensor) -> torch.Tensor | None:
    """The weight of an image's loss by its noise level, as in the SD3 paper; None: 1."""
    if args.weighting_scheme == "sigma_sqrt":
        return level**-2.0
    if args.weighting_scheme == "cosmap":
        return 2 / (math.pi * (1 - 2 * level + 2 * level**2))
    return None


def threshold(args, level: torch.Tensor) -> torch.Tensor:
    """Where the Huber loss turns from a square to a line, for each image [batch, 1, 1, 1]."""
    share = (
        torch.exp(math.log(args.huber_c) * level)
        if args.huber_schedule == "exponential"
        else torch.full_like(level, args.huber_c)
    )
    return share * args.huber_scale


def pointwise(args, predicted: torch.Tensor, target: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The loss of each number. c: of `threshold`."""
    difference = predicted - target
    if args.loss_type == "l2":
        return difference**2
    if args.loss_type == "l1":
        return difference.abs()
    curve = torch.sqrt(difference**2 + c**2) - c
    return 2 * c * curve if args.loss_type == "huber" else 2 * curve
