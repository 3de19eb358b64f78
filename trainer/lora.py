"""The LoRA: peft layers on the Linears of the blocks, and the file that other programs load.

Layers: every Linear of the family's blocks, as in sd-scripts (FLUX.1's fused qkv is three layers here, as with its
split_qkv); musubi-tuner leaves out the modulation of Qwen-Image and Z-Image, and Z-Image's refiners. Initial weights
depend on the seed and the layer's name alone.

File: the names of diffusers (`transformer.….lora_A.weight`), which `FluxPipeline.load_lora_weights` and ComfyUI read
without conversion. The alternative was kohya's names, but diffusers converts them with the sizes of FLUX.1-dev in its
code, so that no other size loads, and fused matrices get three or four times the rank. (sd-scripts' own
`networks/convert_flux_lora.py --src ai-toolkit --dst sd-scripts` converts such a file for sd-scripts.) lora_B is
multiplied by alpha/rank, because not every program reads an alpha. The bytes are a function of weights and metadata
(sorted, without times), so equal runs give equal files.
"""

import json
import math
import re
import struct
from collections.abc import Iterable

from trainer.data_order import seed_for
from trainer.errors import TrainError
from trainer.imports import HIDDEN, hidden

KOHYA = "lora_unet_"
BASE_VERSIONS = {"flux": "flux1", "sdxl": "sdxl_base_v1-0", "sd3": "sd3m"}  # what sd-scripts calls them
IN_METADATA = """
output_name gradient_accumulation_steps gradient_checkpointing learning_rate unet_lr lr_scheduler lr_warmup_steps
max_grad_norm mixed_precision seed loss_type huber_schedule huber_c huber_scale min_snr_gamma zero_terminal_snr
timestep_sampling discrete_flow_shift sigmoid_scale model_prediction_type weighting_scheme guidance_scale
apply_t5_attn_mask network_dropout training_comment
"""
TEXTS = ("author", "description", "license", "tags", "usage_hint", "trigger_phrase")  # of --metadata_…
DTYPES = {"float": "F32", "fp16": "F16", "bf16": "BF16"}


def layers(model, blocks: str) -> list[str]:
    """The names of the Linears that begin with the pattern `blocks`."""
    from torch import nn

    return [name for name, one in model.named_modules() if isinstance(one, nn.Linear) and re.match(blocks, name)]


def add(model, *, rank: int, alpha: float, blocks: str, dropout: float, seed: int, cast_inputs: bool) -> dict:
    """Adds LoRA layers to the Linears whose names begin with `blocks`; returns the trained parameters, float32, by name.

    cast_inputs: True without autocast. With autocast, the products choose their precision themselves, and casting
    each input to float32 first would only cost memory bandwidth.
    """
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    targets = layers(model, blocks)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, init_lora_weights=True)
    with hidden(*HIDDEN):  # peft searches for layers of bitsandbytes, which are not used
        inject_adapter_in_model(config, model)
    parameters = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if not parameter.requires_grad:
            continue
        plain = name.replace(".default.", ".")
        fresh = torch.zeros(parameter.shape, dtype=torch.float32)
        if ".lora_A." in name:
            bound = math.sqrt(1.0 / parameter.shape[1])  # kaiming_uniform with a = sqrt(5), as in sd-scripts
            fresh.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed_for(seed, "lora", plain)))
        parameter.data = fresh.to(parameter.device)
        parameters[plain] = parameter
    for name, module in model.named_modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = cast_inputs
        if dropout and name.endswith(".lora_A.default"):  # behind it, as in sd-scripts; peft's is before it
            module.register_forward_hook(lambda one, _, given: torch.dropout(given, dropout, one.training))
    if len(parameters) != 2 * len(targets):
        raise RuntimeError(f"{len(targets)} layers were to get a LoRA, {len(parameters)} parameters were found")
    return parameters


def check(file: str) -> None:
    """Raises a TrainError when a LoRA to begin with cannot be read. Called before a model is loaded."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            pass
    except (OSError, SafetensorError, ValueError) as problem:
        raise TrainError(f"--network_weights {file}: cannot be read: {problem}; correct the path") from problem


def begin_with(parameters: dict, file: str, scale: float) -> None:
    """Set the weights to those of a LoRA file, with diffusers' names or kohya's. scale: alpha / rank of this run.

    Raises: TrainError when it lacks a layer of this model with this rank.
    """
    from safetensors.torch import load_file

    tensors = load_file(file)
    lacking, kohya = [], kohya_names(parameters)
    for name, parameter in parameters.items():
        known = (f"transformer.{name}", f"unet.{name}", kohya[name], kohya_name(name))  # the last: of older versions
        found = next((one for one in known if one in tensors), "")
        value = tensors.get(found)
        if value is None or value.shape != parameter.shape:
            lacking.append(name)
            continue
        if ".lora_B." in name:  # a file without an alpha has it in its weights
            alpha = tensors.get(found.removesuffix("lora_up.weight") + "alpha")
            value = value.float() * ((1.0 if alpha is None else float(alpha) / value.shape[1]) / scale)
        parameter.data.copy_(value)
    if lacking:
        raise TrainError(
            f"--network_weights {file}: {len(lacking)} of this run's {len(parameters)} weights are not in it in this "
            f"size, such as {lacking[0]}; use a LoRA of the same model, rank and layers"
        )


def to_file(parameters: dict, prefix: str, scale: float, precision: str | None, metadata: dict[str, str]) -> bytes:
    """The bytes of the safetensors file. precision: a key of DTYPES; None: float. prefix KOHYA: with kohya's names."""
    import torch

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision or "float", torch.float32)
    names = kohya_names(parameters) if prefix == KOHYA else {name: prefix + name for name in parameters}
    tensors = {}
    for name, parameter in parameters.items():
        value = parameter.detach().to("cpu", torch.float32)
        tensors[names[name]] = (value * scale if ".lora_B." in name else value).to(dtype)
    downs = [name for name in tensors if name.endswith("lora_down.weight")]
    tensors |= {one.replace("lora_down.weight", "alpha"): torch.tensor(len(tensors[one]), dtype=dtype) for one in downs}
    return serialize(tensors, DTYPES[precision or "float"], metadata)


def kohya_name(name: str) -> str:
    """`mid_block.….to_q.lora_A.weight` → `lora_unet_mid_block_…_to_q.lora_down.weight`."""
    layer, _, matrix = name.removesuffix(".weight").rpartition(".")
    return f"{KOHYA}{layer.replace('.', '_')}.{'lora_down' if matrix == 'lora_A' else 'lora_up'}.weight"


def kohya_names(names: Iterable[str]) -> dict[str, str]:
    """Each name as in sd-scripts, which numbers SDXL's blocks: `down_blocks.1.attentions.0` → `input_blocks_4_1`."""
    size = 1 + max(map(int, re.findall(r"up_blocks\.\d+\.attentions\.(\d+)", " ".join(names))), default=0)

    def numbered(found: re.Match[str]) -> str:
        at = size * int(found[2]) + int(found[3])
        return f"input_blocks_{at + 1}_1" if found[1] == "down" else f"output_blocks_{at}_1"

    found = {name: kohya_name(name).replace("mid_block_attentions_0", "middle_block_1") for name in names}
    return {name: re.sub(r"(down|up)_blocks_(\d+)_attentions_(\d+)", numbered, one) for name, one in found.items()}


def serialize(tensors: dict, kind: str, metadata: dict[str, str]) -> bytes:
    """A safetensors file with sorted contents. The library's own writer does not sort the metadata."""
    import torch

    header: dict[str, object] = {"__metadata__": {key: metadata[key] for key in sorted(metadata)}} if metadata else {}
    blobs, at = [], 0
    for name in sorted(tensors):
        blob = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(blobs)


def describe(t, step: int) -> dict[str, str]:
    """The metadata of a training's LoRA file: ss_* of sd-scripts, modelspec.*, hangproof.*. Without times and paths."""
    args, family = t.args, t.family
    minimum = {
        "ss_base_model_version": BASE_VERSIONS.get(family.key, family.key),
        "ss_network_module": family.module,
        "ss_network_dim": args.network_dim,
        "ss_network_alpha": args.network_alpha,
        "ss_network_args": json.dumps({"train_blocks": args.train_blocks}),
    }
    full = minimum | {f"ss_{flag}": getattr(args, flag) for flag in IN_METADATA.split()}
    full |= {f"modelspec.{what}": getattr(args, f"metadata_{what}") for what in TEXTS}
    full |= {
        "ss_sd_model_name": args.pretrained_model_name_or_path.rstrip("/\\").replace("\\", "/").split("/")[-1],
        "ss_epoch": -(-step // t.per_epoch),
        "ss_steps": step,
        "ss_num_epochs": t.epochs,
        "ss_max_train_steps": t.total,
        "ss_num_train_images": sum(image.repeats for image in t.images),
        "ss_num_batches_per_epoch": len(t.order),
        "ss_optimizer": args.optimizer_type + json.dumps(args.optimizer_options, sort_keys=True),
        "ss_fp8_base": args.stored.startswith("float8"),
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": family.architecture(t.transformer.config),
        "modelspec.implementation": "diffusers",
        "modelspec.title": args.metadata_title or args.output_name,
        "hangproof.backend": "diffusers",
        "hangproof.quantize": args.stored or None,
        "hangproof.split_mode": args.split_mode,
        "hangproof.scale_in_lora_B": args.network_alpha / args.network_dim,
    }
    kept = minimum if args.no_metadata else full
    return {key: str(value) for key, value in kept.items() if value is not None}
