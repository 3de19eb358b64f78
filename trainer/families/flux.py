"""FLUX.1 dev and schnell. Loss, timesteps and layers are those of sd-scripts' flux_train_network.py."""

import torch

from trainer.families import Family
from trainer.families.common import image_ids, pack, sampling, scaled, unpack, with_image

CLIP_TOKENS = 77
from_texts = sampling("true_cfg_scale", prompt_embeds="t5", pooled_prompt_embeds="clip")


def encode(pipe, text: str, args) -> dict:
    """T5 states [tokens, width], CLIP's pooled vector, the T5 mask."""
    limits = (CLIP_TOKENS, args.t5_tokens)
    clip, t5 = [
        tokenizer(text, max_length=limit, padding="max_length", truncation=True, return_tensors="pt").to(
            pipe.text_encoder.device
        )
        for tokenizer, limit in zip((pipe.tokenizer, pipe.tokenizer_2), limits, strict=True)
    ]
    mask = t5.attention_mask
    pooled = pipe.text_encoder(clip.input_ids).pooler_output[0]
    states = pipe.text_encoder_2(t5.input_ids, attention_mask=mask if args.apply_t5_attn_mask else None)[0][0]
    return {"t5": states, "clip": pooled, "mask": mask[0]}


def predict(model, noisy: torch.Tensor, level: torch.Tensor, batch: dict, args) -> torch.Tensor:
    count, _, height, width = noisy.shape
    text, dtype = batch["t5"], batch["t5"].dtype
    guidance = None
    if model.config.guidance_embeds:
        guidance = torch.full((count,), float(args.guidance_scale), device=noisy.device, dtype=dtype)
    extra = {}
    if args.apply_t5_attn_mask:
        extra["attention_mask"] = with_image(batch["mask"], height // 2 * (width // 2))[:, None, None, :]
    predicted = model(
        hidden_states=pack(noisy.to(dtype)),
        encoder_hidden_states=text,
        pooled_projections=batch["clip"],
        timestep=level.to(dtype),
        img_ids=image_ids(height, width, noisy.device),
        txt_ids=torch.zeros(text.shape[1], 3, device=noisy.device),
        guidance=guidance,
        joint_attention_kwargs=extra,
        return_dict=False,
    )[0]
    return unpack(predicted, height, width).float()


def sample(text: dict, without: dict | None, prompt, args) -> dict:
    """FLUX.1 dev's own guidance beside classifier-free guidance, and T5's mask if the run trains with it."""
    found = {**from_texts(text, without, prompt, args), "guidance_scale": prompt.guidance}
    if args.apply_t5_attn_mask:  # the pipeline takes one mask for both texts: here neither loses a token
        mask = text["mask"] if without is None else text["mask"] | without["mask"]
        tokens = (prompt.height // 16) * (prompt.width // 16)
        found["joint_attention_kwargs"] = {"attention_mask": with_image(mask, tokens)[:, None, None, :]}
    return found


FAMILY = Family(
    key="flux",
    name="FLUX.1",
    blocks={
        "all": r"(single_)?transformer_blocks\.",
        "double": r"transformer_blocks\.",
        "single": r"single_transformer_blocks\.",
    },
    encode=encode,
    predict=predict,
    sample=sample,
    latents=scaled,
    t5_tokens=lambda config: 512 if config.get("guidance_embeds") else 256,
    architecture=lambda config: "flux-1-dev/lora" if config["guidance_embeds"] else "flux-1-schnell/lora",
    halves=("single_transformer_blocks", "norm_out", "proj_out"),
)
