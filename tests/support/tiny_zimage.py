"""kohya's real musubi-tuner (Z-Image) on a CPU: a tiny model with random weights, no file of it changed.

A row of tiny_flux.py, which says what each name here is for. The model's sizes are changed right after
the module that defines them has been imported. The VAE and the text encoder, whose weights are large and whose sizes
cannot be changed from outside, are replaced: by one convolution, and by numbers that follow from the caption.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tiny_flux import FINDER, SHARED, command_line, write_images

SOURCE = "src"
SIZES = ((64, 64), (96, 48), (48, 96))
"""Width and height of the images in turn: three buckets."""
WIDTH, HEADS, AXES, CAPTION, LAYERS = 64, 2, [8, 12, 12], 48, 4

SITE = '''
"""Shrinks musubi-tuner's Z-Image when it is imported; see tests/support/tiny_zimage.py."""
def shrink(module):
    module.DEFAULT_TRANSFORMER_DIM, module.DEFAULT_TRANSFORMER_N_LAYERS = %(WIDTH)d, %(LAYERS)d
    module.DEFAULT_TRANSFORMER_N_REFINER_LAYERS = 1
    module.DEFAULT_TRANSFORMER_N_HEADS = module.DEFAULT_TRANSFORMER_N_KV_HEADS = %(HEADS)d
    module.DEFAULT_TRANSFORMER_CAP_FEAT_DIM, module.ROPE_AXES_DIMS = %(CAPTION)d, %(AXES)r

def slow_down(module):
    pause_before(module.ZImageTransformer2DModel)

def replace_vae(module):
    import torch
    class Vae(torch.nn.Module):
        device, dtype = torch.device("cpu"), torch.float32
        def encode(self, pixels):
            weight = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(7)) / 14
            latents = torch.nn.functional.conv2d(pixels.float(), weight, stride=8)
            return types.SimpleNamespace(mode=lambda: latents)
        def decode(self, latents):
            return torch.nn.functional.interpolate(latents[:, :3], scale_factor=8)
    module.load_autoencoder_kl = lambda *args, **kwargs: Vae()

def replace_text_encoder(module):
    import torch
    class Encoder(torch.nn.Module):
        device, dtype = torch.device("cpu"), torch.float32
    def embed(tokenizer, encoder, prompts):
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        seeds = [int(hashlib.sha256(prompt.encode()).hexdigest()[:8], 16) for prompt in prompts]
        rows = [torch.randn(16, %(CAPTION)d, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(rows), torch.ones(len(rows), 16, dtype=torch.bool)
    module.load_qwen3 = lambda *args, **kwargs: (None, Encoder())
    module.get_text_embeds = embed

AFTER = {"musubi_tuner." + name: steps for name, steps in {
    "zimage.zimage_config": [shrink], "zimage.zimage_model": [slow_down], "zimage.zimage_autoencoder": [replace_vae],
    "zimage.zimage_utils": [replace_text_encoder], "utils.train_utils": [record_losses]}.items()}
'''

STAND_INS = {
    "torchvision": {
        "__init__.py": "class utils:\n    @staticmethod\n    def make_grid(images, nrow=8):\n        return images[0]\n"
    },
    "av": {"__init__.py": '__version__ = "0.0"\n'},
}


def site() -> str:
    """Return the text of sitecustomize."""
    return SHARED + SITE % globals() + FINDER


def arguments(work: Path, out: Path, *more: str, **changed: str | None) -> list[str]:
    """Return arguments of zimage_train_network.py: one image per step, AdamW, LoRA rank 4.

    `changed` replaces or adds flags by name (None removes one); `more` is appended.
    """
    flags: dict[str, str | None] = {
        "dit": f"{work}/dit.safetensors",
        "vae": "tiny",
        "text_encoder": "tiny",
        "dataset_config": f"{work}/dataset.toml",
        "output_dir": str(out),
        "output_name": "tiny",
        "network_module": "networks.lora_zimage",
        "network_dim": "4",
        "optimizer_type": "adamw",
        "learning_rate": "1e-3",
        "lr_scheduler": "cosine",
        "mixed_precision": "bf16",  # its samples are drawn in bf16 and fail otherwise
        "timestep_sampling": "shift",
        "discrete_flow_shift": "2.0",
        "weighting_scheme": "none",
        "seed": "42",
        "max_data_loader_n_workers": "0",
    }
    return command_line({**flags, **changed}, "--sdpa", *more)


def make(checkout: Path, work: Path, images: int) -> None:
    """Write weights, images and prompts to `work`. Runs in musubi-tuner's environment with work/site on the path."""
    import torch
    from safetensors.torch import save_file

    sys.path.insert(0, str(checkout / SOURCE))
    from musubi_tuner.zimage import zimage_model

    model = zimage_model.create_model("torch", False, torch.float32)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.ones(value.shape) if "norm" in name else torch.randn(tuple(value.shape), generator=generator) * 0.05
        for name, value in model.state_dict().items()
    }
    save_file(weights, work / "dit.safetensors")
    write_images(work / "images", images, SIZES, seed=3)
    (work / "prompts.txt").write_text("a thing --w 64 --h 64 --s 2 --d 1\n", encoding="utf-8")
