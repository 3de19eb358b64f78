"""--split_mode: a FLUX transformer with only one half on the device at a time.

Upper half: embeddings and double blocks, without gradients. Lower half: single blocks and output layer, trained. Every
forward pass loads the upper half, drops it and loads the lower half, synchronously and in the calling thread. Frozen
weights do not change, so their copy stays on the CPU and nothing is copied back. Swapping single blocks in the background
(sd-scripts' --blocks_to_swap) moves less data, but its worker thread waits on the device, and that is where such runs hang.
LoRA weights and gradients always stay on the device, so nothing moves for the optimizer.

The two halves repeat `FluxTransformer2DModel.forward` in its order; a test compares the results.
"""

from types import MethodType

import torch

LOWER = ("single_transformer_blocks", "norm_out", "proj_out")


def install(transformer, device: torch.device) -> None:
    """Makes the transformer run in halves on `device`; its frozen weights are on the CPU between passes."""
    transformer.halves = Halves(transformer, device)
    transformer.forward = MethodType(forward, transformer)


class Halves:
    """Tracks which half is on the device. `home`: the frozen weights of each half on the CPU."""

    def __init__(self, transformer, device: torch.device):
        self.device = device
        self.present: str | None = None
        lower = {id(p) for name in LOWER for p in getattr(transformer, name).parameters()}
        frozen = [p for p in transformer.parameters() if not p.requires_grad]
        self.parts = {
            "upper": [p for p in frozen if id(p) not in lower],
            "lower": [p for p in frozen if id(p) in lower],
        }
        self.home = {half: [p.data.to("cpu") for p in parts] for half, parts in self.parts.items()}
        for half in self.parts:
            self.drop(half)
        for p in transformer.parameters():
            if p.requires_grad:
                p.data = p.data.to(device)

    def drop(self, half: str) -> None:
        """Removes this half from the device."""
        for p, home in zip(self.parts[half], self.home[half], strict=True):
            p.data = home
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def bring(self, half: str) -> None:
        """Drops the other half, then moves this one to the device. Can be called again after a failure."""
        if self.present == half:
            return
        self.present = None
        for other in self.parts.keys() - {half}:
            self.drop(other)
        for p, home in zip(self.parts[half], self.home[half], strict=True):
            p.data = home.to(self.device)
        self.present = half


def forward(
    self,
    hidden_states,
    encoder_hidden_states=None,
    pooled_projections=None,
    timestep=None,
    img_ids=None,
    txt_ids=None,
    guidance=None,
    joint_attention_kwargs=None,
    return_dict=True,
    **unsupported,
):
    """`FluxTransformer2DModel.forward` in halves."""
    if any(value is not None and value is not False for value in unsupported.values()):
        raise TypeError(f"split mode does not support {', '.join(unsupported)}")
    self.halves.bring("upper")
    with torch.no_grad():
        image, text, vector, rotary = upper_half(
            self,
            hidden_states,
            encoder_hidden_states,
            pooled_projections,
            timestep,
            img_ids,
            txt_ids,
            guidance,
            joint_attention_kwargs,
        )
    self.halves.bring("lower")
    output = lower_half(self, image, text, vector, rotary, joint_attention_kwargs)
    if not return_dict:
        return (output,)
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    return Transformer2DModelOutput(sample=output)


def upper_half(self, image, text, pooled, timestep, img_ids, txt_ids, guidance, attention):
    """Embeddings and double blocks → image tokens, text tokens, modulation vector, rotary positions."""
    image = self.x_embedder(image)
    timestep = timestep.to(image.dtype) * 1000
    if guidance is None:
        vector = self.time_text_embed(timestep, pooled)
    else:
        vector = self.time_text_embed(timestep, guidance.to(image.dtype) * 1000, pooled)
    text = self.context_embedder(text)
    rotary = self.pos_embed(torch.cat((txt_ids, img_ids), dim=0))
    for block in self.transformer_blocks:
        text, image = block(
            hidden_states=image,
            encoder_hidden_states=text,
            temb=vector,
            image_rotary_emb=rotary,
            joint_attention_kwargs=attention,
        )
    return image, text, vector, rotary


def lower_half(self, image, text, vector, rotary, attention):
    """Single blocks and output layer, with gradients when they are enabled."""
    recompute = torch.is_grad_enabled() and self.gradient_checkpointing
    for block in self.single_transformer_blocks:
        if recompute:
            text, image = self._gradient_checkpointing_func(block, image, text, vector, rotary, attention)
        else:
            text, image = block(
                hidden_states=image,
                encoder_hidden_states=text,
                temb=vector,
                image_rotary_emb=rotary,
                joint_attention_kwargs=attention,
            )
    return self.proj_out(self.norm_out(image, vector))
