"""The model families that can be trained: one file each, found by the pipeline that a model's model_index.json names.

A family file says what differs from model to model; the rest of the trainer is the same for all. This file imports no
torch: the page reads `MODULES` from it.
"""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import TrainError

FAMILIES = {
    "FluxPipeline": ("flux", "networks.lora_flux"),
    "Flux2KleinPipeline": ("flux2_klein", "networks.lora_flux_2"),
    "ZImagePipeline": ("z_image", "networks.lora_zimage"),
    "QwenImagePipeline": ("qwen_image", "networks.lora_qwen_image"),
    "StableDiffusion3Pipeline": ("sd3", "networks.lora_sd3"),
    "ChromaPipeline": ("chroma", "networks.lora_flux"),
    "StableDiffusionXLPipeline": ("sdxl", "networks.lora"),
}
"""Pipeline of diffusers → the file here, and what kohya's trainers call its LoRA module, for --network_module and the
metadata of a LoRA."""
MODULES = dict(FAMILIES.values())
INDEX = "model_index.json"


@dataclass(frozen=True)
class Family:
    """What a family has of its own. Latents are float32 [batch, channels, height, width]; texts tensors by name.

    encode: (pipeline of the text encoders, text, arguments) → what is cached of it, each tensor [tokens, …] or [width].
    predict: (model, noisy latents, levels in (0, 1] or timesteps, batch on the device, arguments) → latents.
    sample: (text, negative text or None, prompt, arguments) → the pipeline's arguments; texts are a batch of one.
    latents: (VAE, picture [1, 3, height, width] from -1 to 1) → latents [1, channels, height, width].
    loss: as `flow.loss_of`, which most have; None: that one.
    """

    key: str
    name: str
    blocks: dict[str, str]  # train_blocks → pattern of the names of the Linears that get a LoRA, at their beginning
    encode: Callable[[Any, str, Any], dict[str, Any]]
    predict: Callable[..., Any]
    sample: Callable[..., dict[str, Any]]
    latents: Callable[[Any, Any], Any]
    architecture: Callable[[dict], str]  # the model's configuration → modelspec.architecture
    t5_tokens: Callable[[dict], int] = lambda _: 0  # the model's configuration → T5 tokens of a text
    tokens: int = 0  # of a text without a T5, the template around it not counted; 0: as its tokenizer says
    loss: Callable[..., Any] | None = None
    denoiser: str = "transformer"  # the folder of the part that is trained
    prefix: str = "transformer."  # of the names in a LoRA file
    cfg: float = 1.0  # of a sample prompt without --l, as in sd-scripts
    guidance_is_cfg: bool = False  # the option --g of a prompt is the scale of classifier-free guidance
    patch: int = 2  # latents on each side of a token
    halves: tuple[str, ...] = ()  # for split mode: the modules of the lower half

    @property
    def module(self) -> str:
        """What kohya's trainers call the LoRA module of this family."""
        return MODULES[self.key]


def index(folder: Path) -> dict[str, Any]:
    """The model_index.json of a model in diffusers' layout. Raises: TrainError."""
    if not (folder / INDEX).is_file():
        raise TrainError(
            f"{folder}: {INDEX} is missing, so this is no model in diffusers' layout; download the complete folder"
        )
    return read_json(folder / INDEX)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises: TrainError when the file is not one."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise TrainError(f"{file}: cannot be read, or not valid JSON ({problem}); download it again") from problem
    if not isinstance(found, dict):
        raise TrainError(f"{file}: not a JSON object; download it again")
    return found


def of(folder: Path) -> Family:
    """The family of the model in a folder. Raises: TrainError for one that is not trained here."""
    pipeline = str(index(folder).get("_class_name"))
    if pipeline not in FAMILIES:
        raise TrainError(
            f"{folder} is a model of {pipeline}; the built-in trainer has {', '.join(FAMILIES)}. "
            "Use one of kohya's trainers for it"
        )
    family: Family = importlib.import_module(f"trainer.families.{FAMILIES[pipeline][0]}").FAMILY
    return family
