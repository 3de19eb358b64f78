"""Stable Diffusion 3.5: two CLIP encoders and T5, whose states follow each other as one text."""

import torch

from trainer.families import Family
from trainer.families.common import sampling, scaled


def encode(pipe, text: str, args) -> dict:
    """The states of all encoders [tokens, width], and the pooled vectors of both CLIPs."""
    found = pipe.encode_prompt(text, None, None, do_classifier_free_guidance=False, max_sequence_length=args.t5_tokens)
    return {"text": found[0][0], "pooled": found[2][0]}


def predict(model, noisy: torch.Tensor, level: torch.Tensor, batch: dict, args) -> torch.Tensor:
    return model(
        hidden_states=noisy.to(batch["text"].dtype),
        timestep=level * 1000,
        encoder_hidden_states=batch["text"],
        pooled_projections=batch["pooled"],
        return_dict=False,
    )[0].float()


FAMILY = Family(
    key="sd3",
    name="Stable Diffusion 3.5",
    blocks={"all": r"transformer_blocks\."},
    encode=encode,
    predict=predict,
    sample=sampling("guidance_scale", prompt_embeds="text", pooled_prompt_embeds="pooled"),
    cfg=7.5,
    latents=scaled,
    t5_tokens=lambda config: 256,
    architecture=lambda config: (
        "stable-diffusion-3.5-large/lora" if config["num_layers"] > 30 else "stable-diffusion-3.5-medium/lora"
    ),
)
