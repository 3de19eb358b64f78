"""How much GPU memory a run needs, roughly, so that a tier is chosen before an hour is lost.

A run goes through stages, and needs what the largest of them does:

    text      = T5 + CLIP, in 16 bits, while captions are encoded
    images    = VAE + its activations at the largest bucket
    training  = weights + LoRA + activations + one block computed anew
      weights      parameters × bytes (1 as fp8, 2 as bf16/fp16, 4 in float32); split mode: the larger half only;
                   block swap: without the swapped blocks; not cached text: T5 and CLIP too
      LoRA         rank × Σ(in + out) of the trained layers × (4 weight + 4 gradient + optimizer bytes)
      activations  tokens × width × 2 bytes × blocks (with gradient checkpointing; else × 34 for each block)
      one block    tokens × width × 2 bytes × 40, and its weights in the computing format
    + 1 GB for the CUDA context, the allocator's fragments and the rest

tokens = batch × ((resolution / 16)² + text tokens). The shapes are in models.toml. It is an estimate: attention kernels,
drivers and a desktop on the same GPU move it by a gigabyte or two.
"""

from collections.abc import Mapping
from typing import Any

from presets.tables import defaults, families, find_model, models, tiers

GB = 1e9
OVERHEAD_GB = 1.0
OPTIMIZER_BYTES = {"adafactor": 0.1, "adamw8bit": 2, "adamw": 8, "lion8bit": 1, "lion": 4, "prodigy": 16, "sgd": 4}
NOTE = "an estimate: kernels, drivers and a desktop on the same GPU move it by a gigabyte or two"


def estimate(run: Mapping[str, Any]) -> dict:
    """The memory of a run.

    Args:
        run: fields of a RunSpec (what `run.toml` holds); missing ones have their defaults.

    Returns:
        {"stages_gb": {stage: GB}, "peak_gb", "peak_stage", "parts_gb": of training, "fits": {tier: bool}, "note"}.

    Raises:
        PresetError: no such base model.
    """
    base = defaults()
    key = find_model(run.get("model", base["run"]["model"]))
    model = models()[key]
    run = {**base["run"], **model["settings"], **run}
    flags = {**base["all"], **base["flags"], **tiers()[run["tier"]]["flags"], **run.get("extra", {})}
    shape = {**families()[model["family"]]["shape"], **model["shape"]}
    parts = _training(run, flags, shape)
    text = shape["text_parameters"] * 2 / GB + OVERHEAD_GB
    pixels = run["batch_size"] * run["resolution"] ** 2 if "vae_batch_size" in flags else run["resolution"] ** 2
    images = shape["vae_parameters"] * 2 / GB + pixels * shape["vae_bytes_a_pixel"] / GB + OVERHEAD_GB
    stages = {"text": text, "images": images, "training": sum(parts.values())}
    stages = {name: round(value, 1) for name, value in stages.items()}
    peak = max(stages, key=lambda name: stages[name])
    return {
        "model": key,
        "stages_gb": stages,
        "peak_gb": stages[peak],
        "peak_stage": peak,
        "parts_gb": {name: round(value, 2) for name, value in parts.items()},
        "fits": {name: stages[peak] <= tier["vram_gb"] for name, tier in tiers().items()},
        "note": NOTE,
    }


def _training(run: Mapping[str, Any], flags: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, float]:
    """The parts of the training stage in GB."""
    compute = 4 if run["mixed_precision"] == "no" else 2
    stored = 1 if compute == 2 and (flags.get("fp8_base") or flags.get("fp8_base_unet")) else compute
    double, single = shape["double_parameters"], shape["single_parameters"]
    doubles, singles = shape["double_blocks"], shape["single_blocks"]
    kept = double * doubles + single * singles + shape["other_parameters"]
    if flags.get("split_mode"):
        kept = max(double * doubles + shape["other_parameters"], single * singles)
    elif flags.get("blocks_to_swap"):
        # sd-scripts swaps N // 2 double and twice the rest of single blocks (flux_models.enable_block_swap)
        swapped = int(float(flags["blocks_to_swap"]))
        kept -= min(doubles, swapped // 2) * double + min(singles, (swapped - swapped // 2) * 2) * single
    weights = kept * stored
    if not (flags.get("cache_text_encoder_outputs") or flags.get("cache_text_encoder_outputs_to_disk")):
        weights += shape["text_parameters"] * 2
    trained = " ".join(flags.get("network_args") or [])
    sides = 0 if "train_blocks=single" in trained else shape["double_lora_sides"] * doubles
    sides += 0 if "train_blocks=double" in trained else shape["single_lora_sides"] * singles
    optimizer = OPTIMIZER_BYTES.get(str(flags.get("optimizer_type", "adamw")).lower(), 8)
    lora = run["rank"] * sides * (4 + 4 + optimizer)
    tokens = run["batch_size"] * ((run["resolution"] // 16) ** 2 + shape["text_tokens"])
    row = tokens * shape["width"] * compute
    through = singles if flags.get("split_mode") else doubles + singles
    activations = row * through * (1 if flags.get("gradient_checkpointing") else 34)
    one_block = row * 40 + max(double, single) * compute
    return {
        "weights": weights / GB,
        "LoRA": lora / GB,
        "activations": activations / GB,
        "one block": one_block / GB,
        "rest": OVERHEAD_GB,
    }
