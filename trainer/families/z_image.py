"""Z-Image. Its transformer takes lists, counts the time from noise (0) to image (1), and predicts the way back."""

import torch

from trainer.families import Family
from trainer.families.common import scaled


def encode(pipe, text: str, args) -> dict:
    """Qwen3's states of the tokens of the text, without padding."""
    (states,), _ = pipe.encode_prompt(text, do_classifier_free_guidance=False)
    return {"text": states, "mask": torch.ones(len(states), dtype=torch.long)}


def texts(batch: dict) -> list[torch.Tensor]:
    """The states of each text, without the padding of a batch."""
    return [states[mask.bool()] for states, mask in zip(batch["text"], batch["mask"], strict=True)]


def predict(model, noisy: torch.Tensor, level: torch.Tensor, batch: dict, args) -> torch.Tensor:
    images = list(noisy.to(batch["text"].dtype)[:, :, None].unbind(0))
    predicted = model(images, 1 - level, texts(batch), return_dict=False)[0]
    return -torch.stack([one.float() for one in predicted])[:, :, 0]


def sample(text: dict, without: dict | None, prompt, args) -> dict:
    """`guidance_scale` is added to the prediction here, so that 0 is what others call 1."""
    scale = max(0.0, prompt.cfg - 1.0) if without is not None else 0.0
    return {
        "prompt_embeds": texts(text),
        "negative_prompt_embeds": texts(without) if without is not None else [],
        "guidance_scale": scale,
    }


FAMILY = Family(
    key="z_image",
    name="Z-Image",
    blocks={"all": r"(layers|noise_refiner|context_refiner)\."},
    encode=encode,
    predict=predict,
    sample=sample,
    latents=scaled,
    architecture=lambda config: "z-image/lora",
    tokens=512 - 8,
)
