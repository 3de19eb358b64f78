"""Chroma: FLUX.1's blocks without CLIP and guidance; of the padding of a text, only the first token is seen."""

import torch
from torch.utils.checkpoint import checkpoint

from trainer.families import Family
from trainer.families.common import image_ids, pack, sampling, scaled, unpack, with_image
from trainer.families.flux import FAMILY as FLUX


def encode(pipe, text: str, args) -> dict:
    """T5 states [tokens, width] and their mask, which keeps one token of the padding."""
    found = pipe.encode_prompt(text, do_classifier_free_guidance=False, max_sequence_length=args.t5_tokens)
    return {"t5": found[0][0], "mask": found[2][0].bool()}


def predict(model, noisy: torch.Tensor, level: torch.Tensor, batch: dict, args) -> torch.Tensor:
    _, _, height, width = noisy.shape
    text, mask = batch["t5"], with_image(batch["mask"], height // 2 * (width // 2))
    if model.gradient_checkpointing:  # diffusers (0.42.1) leaves out the mask of a single block, its last argument
        model._gradient_checkpointing_func = lambda block, *given: checkpoint(
            block, *(given if len(given) > 3 else (*given, mask)), use_reentrant=False
        )
    predicted = model(
        hidden_states=pack(noisy.to(text.dtype)),
        encoder_hidden_states=text,
        timestep=level.to(text.dtype),
        img_ids=image_ids(height, width, noisy.device),
        txt_ids=torch.zeros(text.shape[1], 3, device=noisy.device),
        attention_mask=mask,
        return_dict=False,
    )[0]
    return unpack(predicted, height, width).float()


FAMILY = Family(
    key="chroma",
    name="Chroma",
    blocks=FLUX.blocks,
    encode=encode,
    predict=predict,
    sample=sampling("guidance_scale", prompt_embeds="t5", prompt_attention_mask="mask"),
    latents=scaled,
    t5_tokens=lambda config: 512,
    architecture=lambda config: "chroma/lora",
    halves=FLUX.halves,
)
