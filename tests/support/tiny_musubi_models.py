"""Shrinks the families of musubi-tuner as they are imported, and makes their weights. Runs in its processes only.

Sizes change, and the encoders are replaced: a VAE and a text encoder read the images and captions once, before
training, and their weights are large. Each replacement computes its result from the pixels or the words alone, so a
cache that is made again is the same.

By hand, with this folder and WORK/site on the path: `python -m tiny_musubi_models CHECKOUT WORK FAMILY IMAGES`.
"""

import functools
import hashlib
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tiny_shrink import shrink

Change = Callable[[ModuleType], None]

WIDTH, HEADS, LAYERS, TOKENS, TEXT = 64, 2, 2, 16, 48
"""Of every transformer: width, attention heads, blocks; of every text: tokens, width."""
SIZES = ((64, 64), (96, 48), (48, 96))
"""Width and height of the images in turn: three buckets."""
TEXT_LAYERS = 2  # Krea 2 gets the states of several layers of its text encoder
if not torch.cuda.is_available():
    torch.cuda.current_device = lambda: 0  # asked for while Wan's text encoder is imported, GPU or not


class Vae(torch.nn.Module):
    """Latents are a fixed convolution of the pixels, pixels the first three channels of the latents."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, channels: int = 16, factor: int = 8) -> None:
        super().__init__()
        self.factor = factor
        weight = torch.randn(channels, 3, factor, factor, generator=torch.Generator().manual_seed(7))
        self.weight = torch.nn.Parameter(weight / (14 * factor / 8), requires_grad=False)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(pixels.float(), self.weight.float(), stride=self.factor)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(latents[:, :3].float(), scale_factor=self.factor)


class ZImageVae(Vae):
    def encode(self, pixels):
        latents = super().encode(pixels)
        return types.SimpleNamespace(mode=lambda: latents)


class QwenImageVae(Vae):
    def encode_pixels_to_latents(self, pixels):
        return self.encode(pixels[:, :, 0]).unsqueeze(2)

    def decode_to_pixels(self, latents):
        return (self.decode(latents[:, :, 0]) / 2 + 0.5).clamp(0, 1)


class WanVae(Vae):
    def encode(self, videos):
        return [super(WanVae, self).encode(video.transpose(0, 1)).transpose(0, 1) for video in videos]

    def decode(self, latents):
        return [super(WanVae, self).decode(latent.transpose(0, 1)).transpose(0, 1) for latent in latents]


class TextEncoder(torch.nn.Module):
    """Numbers that follow from the words. dtype: what its callers compute with."""

    device, dtype = torch.device("cpu"), torch.bfloat16

    def __init__(self, shape: tuple[int, ...] = (TOKENS, TEXT)) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, prompts: str | list[str]) -> torch.Tensor:
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        seeds = [int(hashlib.sha256(prompt.encode()).hexdigest()[:8], 16) for prompt in prompts]
        return torch.stack([torch.randn(self.shape, generator=torch.Generator().manual_seed(s)) for s in seeds])


def _mask(prompts: str | list[str]) -> torch.Tensor:
    return torch.ones(1 if isinstance(prompts, str) else len(prompts), TOKENS, dtype=torch.bool)


def _always(made: Callable[[], object]) -> Callable[..., object]:
    return lambda *args, **kwargs: made()


def _set(**names: object) -> Change:
    """Return a change that sets names of the module, and sizes of its classes (tiny_shrink.py)."""
    return functools.partial(shrink, sizes=names)


def _qwen_encoder(load: str, embed: str, **names: Callable[[], object]) -> Change:
    """A change that replaces Qwen's text encoder: `load` makes it, `embed` encodes prompts; what `names` load."""
    encode = lambda _, __, prompts: (TextEncoder()(prompts), _mask(prompts))  # noqa: E731
    loads = {load: lambda: (None, TextEncoder()), **names}
    return _set(**{name: _always(made) for name, made in loads.items()}, **{embed: encode})


_FLUX = {"hidden_size": WIDTH, "num_heads": HEADS, "depth": LAYERS, "depth_single_blocks": LAYERS}
_FLUX |= {"context_in_dim": TEXT}


def _flux_2(module: ModuleType) -> None:
    for info in module.FLUX2_MODEL_INFO.values():
        vars(info.params).update(_FLUX, axes_dim=[8] * 4)
    module.load_ae = _always(lambda: Vae(128, 16))
    module.load_text_embedder = _always(TextEncoder)


def _kontext(module: ModuleType) -> None:
    vars(module.configs_flux_dev_context.params).update(_FLUX, vec_in_dim=TEXT, axes_dim=[8, 12, 12])


class _Tokens(dict):  # type: ignore[type-arg]
    """What a tokenizer returns, with the text itself in place of the tokens."""

    def to(self, device: object) -> "_Tokens":
        return self


def _kontext_encoders(module: ModuleType) -> None:
    def tokenizer(prompts: object, **_: object) -> _Tokens:
        tokens = _Tokens(prompts=prompts)
        tokens["input_ids"] = tokens
        return tokens

    class Encoder(TextEncoder):
        """As T5 and as CLIP."""

        def forward(self, input_ids: Any, **_: object) -> Any:
            return dict.fromkeys(("last_hidden_state", "pooler_output"), super().forward(input_ids["prompts"]))

    module.load_t5xxl = _always(lambda: (tokenizer, Encoder()))
    module.load_clip_l = _always(lambda: (tokenizer, Encoder((TEXT,))))
    module.load_ae = _always(Vae)


def _wan(module: ModuleType) -> None:
    sizes = {"dim": WIDTH, "ffn_dim": 2 * WIDTH, "freq_dim": WIDTH, "num_heads": HEADS, "num_layers": LAYERS}
    for config in module.WAN_CONFIGS.values():
        config.update(sizes, text_len=TOKENS)  # of EasyDict


def wan_text_encoder(**_: object) -> Callable[..., list[torch.Tensor]]:
    """Stands for a class that is no torch module, and is called with texts and a device."""
    return lambda texts, device: list(TextEncoder()(texts).to(torch.bfloat16))


def _krea2(module: ModuleType) -> None:
    sizes = {"features": WIDTH, "heads": HEADS, "kvheads": 1, "layers": LAYERS, "tdim": WIDTH, "txtlayers": TEXT_LAYERS}
    vars(module.single_mmdit_large_wide).update(txtdim=TEXT, txtheads=HEADS, txtkvheads=HEADS, **sizes)
    module.load_krea2_text_encoder = _always(lambda: TextEncoder((TOKENS, TEXT_LAYERS, TEXT)))
    module.get_krea2_prompt_embeds = lambda encoder, prompts: (encoder(prompts), _mask(prompts))


_QWEN: dict[str, Any] = {"num_layers": LAYERS, "attention_head_dim": WIDTH // HEADS, "num_attention_heads": HEADS}
_QWEN |= {"axes_dims_rope": (8, 12, 12), "joint_attention_dim": TEXT}
_Z_IMAGE = {"N_HEADS": HEADS, "N_KV_HEADS": HEADS, "N_LAYERS": 2 * LAYERS, "N_REFINER_LAYERS": 1, "CAP_FEAT_DIM": TEXT}
_Z_IMAGE |= {"DIM": WIDTH}
AFTER: dict[str, Change] = {
    "zimage.zimage_config": _set(
        ROPE_AXES_DIMS=[8, 12, 12], **{f"DEFAULT_TRANSFORMER_{name}": value for name, value in _Z_IMAGE.items()}
    ),
    "zimage.zimage_autoencoder": _set(load_autoencoder_kl=_always(ZImageVae)),
    "zimage.zimage_utils": _qwen_encoder("load_qwen3", "get_text_embeds"),
    "flux_2.flux2_utils": _flux_2,
    "qwen_image.qwen_image_model": _set(QwenImageTransformer2DModel=_QWEN),
    "qwen_image.qwen_image_utils": _qwen_encoder("load_qwen2_5_vl", "get_qwen_prompt_embeds", load_vae=QwenImageVae),
    "wan.configs": _wan,
    "wan.modules.model": _set(WanModel={"text_dim": TEXT}),
    "wan.modules.vae": _set(WanVAE=_always(WanVae)),
    "wan.modules.t5": _set(T5EncoderModel=wan_text_encoder),
    "krea2.krea2_utils": _krea2,
    "flux.flux_models": _kontext,
    "flux.flux_utils": _kontext_encoders,
}
"""Module of musubi_tuner → its change."""


_module = functools.partial(importlib.import_module, package="musubi_tuner")


def _wan_model() -> Any:
    names = ("dim", "ffn_dim", "freq_dim", "in_dim", "out_dim", "num_heads", "num_layers", "text_len", "eps")
    config = _module(".wan.configs").WAN_CONFIGS["t2v-A14B"]
    sizes = {name: getattr(config, name) for name in names}
    return _module(".wan.modules.model").WanModel(model_version="2.2", attn_mode="torch", **sizes)


_TRANSFORMERS: dict[str, Callable[[], Any]] = {
    "zimage": lambda: _module(".zimage.zimage_model").create_model("torch", False, torch.float32),
    "flux_2": lambda: _module(".flux_2.flux2_models").Flux2(
        _module(".flux_2.flux2_utils").FLUX2_MODEL_INFO["klein-base-4b"].params, "torch"
    ),
    "qwen_image": lambda: _module(".qwen_image.qwen_image_model").create_model("torch", *[False] * 4, None),
    "wan": _wan_model,
    "krea2": lambda: _module(".krea2.krea2_mmdit").SingleStreamDiT(
        _module(".krea2.krea2_utils").single_mmdit_large_wide
    ),
    "flux_kontext": lambda: (flux := _module(".flux.flux_models")).Flux(flux.configs_flux_dev_context.params),
}


DTYPES = {"wan": torch.float32, "zimage": torch.float32}
"""Of the weights on a processor, whose autocast knows no float32; bfloat16 for the other families."""


def make(checkout: Path, work: Path, family: str, images: int) -> None:
    """Write weights, images and prompts to `work`. Of the two files of weights, most families use the first."""
    from safetensors.torch import save_file

    from benchmarks import tiny_flux as tiny

    sys.path.insert(0, str(checkout / "src"))
    for seed, file in enumerate(("dit", "dit_high_noise"), 1):
        generator = torch.Generator().manual_seed(seed)

        def values(name: str, shape: tuple[int, ...], generator: torch.Generator = generator) -> torch.Tensor:
            random = torch.randn(shape, generator=generator) * 0.05
            return (torch.ones(shape) if "norm" in name else random).to(DTYPES.get(family, torch.bfloat16))

        shapes = {name: tuple(value.shape) for name, value in _TRANSFORMERS[family]().state_dict().items()}
        save_file({name: values(name, shape) for name, shape in shapes.items()}, work / f"{file}.safetensors")
    tiny.write_images(work / "images", images, SIZES, seed=3)
    (work / "prompts.txt").write_text("a thing --w 64 --h 64 --s 2 --d 1\n", encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
