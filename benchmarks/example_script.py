"""Runs an example script of diffusers unchanged, with the random numbers and LoRA layers of the built-in trainer.

    python benchmarks/example_script.py SCRIPT SEED RESULT FLAGS…

What the script draws at random is drawn as the trainer draws it: the noise and noise level of each step, and the first
weights of the LoRA, which also gets the trainer's layers. The loss of each step and when it began are written to RESULT
as JSON. The images must have the size they are trained in: nothing here resizes them.
"""

import json
import runpy
import sys
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy
import torch
from diffusers import FluxPipeline, StableDiffusionXLPipeline  # noqa: F401 - before torchvision seems to be there

from trainer import families, lora
from trainer.data_order import seed_for


def main(argv: list[str]) -> None:
    """Arguments: the script, the seed, the file for the losses of the steps, then the flags of the script."""
    script, seed, result, *flags = argv
    told = dict(zip(flags[::2], flags[1::2], strict=True))
    family = families.of(Path(told["--pretrained_model_name_or_path"]))
    torchvision_for_images_of_the_right_size()
    steps: list[dict[str, float]] = []
    draw_as_the_trainer(int(seed), steps)
    place_the_lora(family, int(told["--rank"]), int(seed))
    record_losses(steps)
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")
    Path(result).write_text(json.dumps(steps), encoding="utf-8")


def torchvision_for_images_of_the_right_size() -> None:
    """What the scripts import from torchvision, which has no build for the CPU: an image becomes numbers."""

    def same(*_: Any, **__: Any) -> Any:
        return lambda image: image

    def compose(*_: Any) -> Any:
        return lambda image: torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 127.5 - 1

    same.get_params = lambda image, size: (0, 0, *size)  # type: ignore[attr-defined]
    transforms = types.SimpleNamespace(
        InterpolationMode=types.SimpleNamespace(BILINEAR="bilinear", LANCZOS="lanczos"), Compose=compose
    )
    for name in ("Resize", "RandomHorizontalFlip", "ToTensor", "Normalize"):
        setattr(transforms, name, same)
    crop = lambda image: image  # noqa: E731
    crop.get_params = same.get_params  # type: ignore[attr-defined]
    transforms.CenterCrop = transforms.RandomCrop = lambda size: crop
    functional = types.SimpleNamespace(crop=lambda image, *_: image)
    modules = {"torchvision": types.ModuleType("torchvision"), "torchvision.transforms": transforms}
    modules["torchvision"].transforms = transforms  # type: ignore[attr-defined]
    sys.modules.update({**modules, "torchvision.transforms.functional": functional})  # type: ignore[dict-item]


def draw_as_the_trainer(seed: int, steps: list[dict[str, float]]) -> None:
    """A step's noise is drawn first, so that begins the step and its generator (trainer/flow.py)."""
    from diffusers import training_utils
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    generator = torch.Generator()

    def noise(like: torch.Tensor) -> torch.Tensor:
        generator.manual_seed(seed_for(seed, "noise", len(steps), 0, 0))
        steps.append({"mono_s": time.monotonic()})
        return torch.randn(like.shape, generator=generator)

    randint = torch.randint
    torch.randn_like = noise
    torch.randint = lambda low, high, size, **_: randint(low, high, size, generator=generator)
    training_utils.compute_density_for_timestep_sampling = lambda batch_size, **_: torch.rand(
        batch_size, generator=generator
    )
    DiagonalGaussianDistribution.sample = DiagonalGaussianDistribution.mode


def place_the_lora(family: families.Family, rank: int, seed: int) -> None:
    """The model's `add_adapter` gives it the trainer's layers, and the weights with which the trainer begins."""
    from diffusers.loaders.peft import PeftAdapterMixin

    def add(model: Any, *_: Any, **__: Any) -> None:
        lora.add(model, rank=rank, alpha=rank, blocks=family.blocks["all"], dropout=0, seed=seed, cast_inputs=True)
        model._hf_peft_config_loaded = True

    PeftAdapterMixin.add_adapter = add


def record_losses(steps: list[dict[str, float]]) -> None:
    """The loss of the latest step."""
    from accelerate import Accelerator

    backward = Accelerator.backward

    def recorded(accelerator: Any, loss: torch.Tensor, **more: Any) -> None:
        backward(accelerator, loss, **more)
        steps[-1]["loss"] = loss.item()

    Accelerator.backward = recorded


if __name__ == "__main__":
    main(sys.argv[1:])
