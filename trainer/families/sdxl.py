"""SDXL and the models trained from it: noise in 1,000 discrete steps, predicted as noise or as velocity.

Steps, loss and the sizes that the model is told are those of sd-scripts' sdxl_train_network.py. A LoRA file has kohya's
names (`lora_unet_input_blocks_4_1_…`), which every program reads.
"""

import functools

import torch

from trainer import flow, lora
from trainer.families import Family
from trainer.families.common import sampling, scaled

STEPS = 1000


def encode(pipe, text: str, args) -> dict:
    """The states of both CLIP encoders side by side [77, 2048], the pooled vector of the second."""
    found = pipe.encode_prompt(text, do_classifier_free_guidance=False)
    return {"text": found[0][0], "pooled": found[2][0]}


@functools.cache
def kept_signal(zero_terminal_snr: bool) -> torch.Tensor:
    """ᾱ of each timestep: the share of the image's variance that is left."""
    from diffusers import DDPMScheduler

    return DDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        num_train_timesteps=STEPS,
        rescale_betas_zero_snr=zero_terminal_snr,
    ).alphas_cumprod


def predict(model, noisy: torch.Tensor, timesteps: torch.Tensor, batch: dict, args) -> torch.Tensor:
    text = batch["text"]
    told = {"text_embeds": batch["pooled"], "time_ids": batch["sizes"]}
    return model(noisy.to(text.dtype), timesteps, text, added_cond_kwargs=told, return_dict=False)[0].float()


def loss_of(args, family, model, batch: dict, seed: int, device, dtype, level: float | None = None) -> torch.Tensor:
    """The loss of one micro-batch, a scalar with gradients. level: the share of the timesteps; None draws them."""
    latents, noise, generator = flow.begin(batch, seed, device)
    count = len(latents)
    steps = torch.randint(0, STEPS, (count,), generator=generator)
    if level is not None:
        steps = torch.full((count,), int(level * STEPS))
    kept = kept_signal(args.zero_terminal_snr)[steps].to(device).view(-1, 1, 1, 1)
    noisy = kept.sqrt() * latents + (1 - kept).sqrt() * noise
    target = kept.sqrt() * noise - (1 - kept).sqrt() * latents if args.v_parameterization else noise
    predicted = family.predict(model, noisy, steps.to(device), flow.on_device(batch, device, dtype), args)
    c = flow.threshold(args, (steps / STEPS).to(device).view(-1, 1, 1, 1))
    if args.huber_schedule == "snr":  # sd-scripts' get_huber_threshold_if_needed
        c = (1 - args.huber_c) / (1 + ((1 - kept) / kept).sqrt()) ** 2 + args.huber_c
    loss = flow.pointwise(args, predicted, target, c)
    if args.min_snr_gamma:  # arXiv:2303.09556; in sd-scripts, --zero_terminal_snr does not change this weight
        kept = kept_signal(False)[steps].to(device).view(-1, 1, 1, 1)
        snr = kept / (1 - kept)
        loss = loss * torch.minimum(snr, torch.full_like(snr, args.min_snr_gamma)) / (snr + args.v_parameterization)
    return flow.mean(loss, batch)


FAMILY = Family(
    key="sdxl",
    name="SDXL",
    blocks={"all": r".*\.attentions\."},
    encode=encode,
    predict=predict,
    sample=sampling("guidance_scale", prompt_embeds="text", pooled_prompt_embeds="pooled"),
    cfg=7.5,
    latents=scaled,
    architecture=lambda config: "stable-diffusion-xl-v1-base/lora",
    loss=loss_of,
    denoiser="unet",
    prefix=lora.KOHYA,
)
