"""Estimates the GPU memory, time and disk space of a run, so that a tier that is too small is noticed before the start.

Memory: the table of the family has a figure for each tier at the default settings (families/NAME.toml, which says where
it comes from), the part of it that grows with resolution² × batch size, and the weights of a LoRA of rank 1. Text
encoders that work before training, and need more, have a figure of their own. The actual use differs by one or two
gigabytes with the attention kernels, the driver and a desktop on the same GPU. Of FLUX.1 it was measured on a GPU
(docs/measurements.md): a training takes 0.3 to 1 GB less than this says.
"""

from collections.abc import Mapping
from typing import Any

from presets.steps import planned_steps
from presets.tables import (
    GENERATED_GB,
    NOTE,
    backend_of,
    defaults,
    families,
    find_model,
    models,
    smallest_tier,
    tier_flags,
    tiers,
    tiers_of,
    trainer_of,
)

GB = 1e9
PNG_BYTES = 2.0  # of a pixel of a generated image
OPTIMIZER_BYTES = {"adafactor": 0.1, "adamw8bit": 2, "lion8bit": 1, "lion": 4, "prodigy": 16, "sgd": 4}  # others: 8
WEIGHT_BYTES = {"nf4": 0.57}  # of a quantized weight, its scale included; the others have 8 bits
SIZES = {"text_tokens": 512, "text_width": 4096}  # of FLUX.1


def estimate(run: Mapping[str, Any]) -> dict:
    """The GPU memory of a run in GB.

    Args:
        run: fields of a RunSpec (the contents of `run.toml`); missing fields have their defaults.

    A tier that cannot hold the family has the figure of the smallest one that can.

    Returns:
        {"model", "stages_gb": {stage: GB}, "peak_gb", "peak_stage", "tiers": {tier: whether its memory is enough},
        "note": what the figure is based on}.

    Raises:
        PresetError: there is no such base model.
    """
    key, run, flags, shape = _settled(run)
    _, usual, usual_flags, _ = _settled({name: run[name] for name in ("model", "backend", "tier") if name in run})
    trainer, rows = trainer_of(key, run["backend"]), tiers_of(key, run["backend"])
    row = rows[smallest_tier(key, run["backend"]) if rows[run["tier"]]["problem"] else run["tier"]]
    if models()[key]["generated"]:
        stages = {"training": GENERATED_GB}
    else:
        size = run["batch_size"] * run["resolution"] ** 2 / (usual["batch_size"] * usual["resolution"] ** 2)
        lora = shape["lora_sides"] * (run["rank"] - usual["rank"]) * (8 + _optimizer_bytes(flags)) / GB
        weights = row["weights_gb"] * (_weight_bytes(run, flags) / _weight_bytes(usual, usual_flags) - 1)
        stages = {"text": 0.0 if flags.get("text_encoder_cpu") else trainer["text_gb"]}
        stages["training"] = row["training_gb"] + trainer["activations_gb"] * (size - 1) + lora + weights
    stages = {name: round(value, 1) for name, value in stages.items() if value}
    peak = max(stages, key=lambda name: stages[name])
    return {
        "model": key,
        "stages_gb": stages,
        "peak_gb": stages[peak],
        "peak_stage": peak,
        "tiers": {name: stages[peak] <= tier["vram_gb"] for name, tier in tiers().items()},
        "note": NOTE if models()[key]["generated"] else f"{row['basis']}; {NOTE}",
    }


def _settled(run: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(model key, the run with its defaults, the trainer's flags that matter here, the model's sizes)."""
    usual = defaults()["run"]
    key = find_model(run.get("model", usual["model"]))
    model = models()[key]
    full = {**usual, "backend": backend_of(key), **model["settings"], **run}
    memory, trainer = tier_flags(key, full["backend"], full["tier"]), trainer_of(key, full["backend"])
    flags = {**memory, **trainer["flags"], **model["flags"], **full.get("extra", {})}
    return key, full, flags, {**SIZES, "lora_sides": families()[model["family"]]["lora_sides"], **model["shape"]}


def table_time(run: Mapping[str, Any]) -> tuple[float, float, str]:
    """(seconds of one step, seconds until the first step, source) from the table in defaults.toml."""
    key, run, _, shape = _settled(run)
    speed, family = defaults()["speed"], families()[models()[key]["family"]]
    images = run["batch_size"] * run["gradient_accumulation"]
    if models()[key]["generated"]:
        entry = speed["generated"]
        return entry["step_s"] * images, entry["start_s"], entry["source"]
    thousands = ((run["resolution"] / 16) ** 2 + shape["text_tokens"]) * images / 1000
    if "speed" not in family:  # FLUX.1, with which the others are compared
        tier = speed["tiers"][run["tier"]]
        return tier["s_per_1000_tokens"] * thousands, speed["start_s"], tier["source"]
    memory = tiers()[run["tier"]]["vram_gb"]
    gpu = [row for name, row in speed["other"].items() if tiers()[name]["vram_gb"] <= memory][-1]
    source = f"estimated from the time of FLUX.1 and the size of {family['name']}"
    return gpu["s_per_1000_tokens"] * family["speed"] * thousands, speed["start_s"], source


def samples_s(run: Mapping[str, Any], prompts: int, step_s: float, steps: int) -> float:
    """Seconds that sample images take: one denoising step is a forward pass, about a third of a training step."""
    every = run.get("sample_every_n_steps") or 0
    one_image_s = step_s / (run["batch_size"] * run["gradient_accumulation"])
    return steps // every * prompts * run["sample_steps"] * one_image_s / 3 if every else 0.0


def cost(run: Mapping[str, Any], seconds: float) -> float | None:
    """What a run of so many seconds costs at its price per hour; None without a price."""
    price = run.get("price_per_hour") or 0.0
    return price * seconds / 3600 if price else None


def disk(run: Mapping[str, Any], images: Mapping[str, int]) -> dict[str, float]:
    """Bytes that a run writes: {"checkpoints": training states, "LoRAs": saved files, "caches": latents and captions,
    "samples": sample images}. images: their number by folder."""
    _, run, flags, shape = _settled(run)
    parameters = run["rank"] * shape["lora_sides"]
    steps = planned_steps(run, images)
    every = run["save_every_n_epochs"] * planned_steps({**run, "max_train_steps": None, "epochs": 1}, images)
    by_epoch = (steps - 1) // every if every else 0  # the last one is that of the end
    state = parameters * (4 + _optimizer_bytes(flags))
    latent = (run["resolution"] / 8) ** 2 * 16 * 4
    text = shape["text_tokens"] * shape["text_width"] * 4
    drawn = run.get("sample_every_n_steps") or 0
    pictures = steps // drawn * (len(run.get("prompts") or []) or 1) if drawn else 0
    return {
        # Of the newest steps and of the newest epochs, and one that is being written before an old one is deleted
        "checkpoints": state * (run["keep_states"] + min(by_epoch, run["keep_states"]) + 1),
        "LoRAs": parameters * (4 if run["mixed_precision"] == "no" else 2) * (by_epoch + run["keep_states"] + 1),
        "caches": sum(images.values()) * (latent + text),
        "samples": pictures * run["resolution"] ** 2 * PNG_BYTES,
    }


def _weight_bytes(run: Mapping[str, Any], flags: Mapping[str, Any]) -> float:
    """Bytes of a weight of the base model."""
    if quantize := flags.get("quantize"):
        return WEIGHT_BYTES.get(quantize, 1)
    if run["mixed_precision"] == "no":
        return 4
    return 1 if flags.get("fp8_base") or flags.get("fp8_scaled") else 2


def _optimizer_bytes(flags: Mapping[str, Any]) -> float:
    return OPTIMIZER_BYTES.get(str(flags.get("optimizer_type", "adamw")).lower(), 8)
