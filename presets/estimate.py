"""Estimates the GPU memory, time and disk space of a run, so that a tier that is too small is noticed before the start.

A run has three stages and needs as much memory as the largest:

    text      = T5 + CLIP in 16 bits, while captions are encoded
    images    = VAE + its activations at the largest bucket
    training  = weights + LoRA + activations + one block recomputed
      weights      parameters × bytes (STORED, else bf16 and fp16: 2, float32: 4); split mode: the half that is trained;
                   block swap and streaming: without those blocks; text not cached: also T5 and CLIP
      LoRA         rank × Σ(in + out) of the trained layers × (4 weight + 4 gradient + optimizer bytes)
      activations  tokens × width × 2 bytes × blocks (without gradient checkpointing: × 34)
      one block    tokens × width × 2 bytes × 40, and its weights in the compute precision
    + 1 GB for the CUDA context, fragmentation and the rest

tokens = batch × ((resolution / 16)² + text tokens). The shapes are in families/NAME.toml. The actual use differs by one
or two gigabytes with the attention kernels, the driver and a desktop on the same GPU. Of FLUX.1 it was measured on a GPU
(docs/measurements.md): a training takes 0.3 to 0.9 GB less than this says.

A family without a shape has a figure in its table instead, for each tier at the default settings, with the part of it
that grows with resolution² × batch size and the weights of its LoRA. The result says what the figure is based on.
"""

import copy
from collections.abc import Mapping
from typing import Any

from presets.steps import planned_steps
from presets.tables import (
    backend_of,
    defaults,
    families,
    find_model,
    models,
    tier_entry,
    tier_flags,
    tier_problem,
    tiers,
    trainer_of,
)

GB = 1e9
OVERHEAD_GB = 1.0
PNG_BYTES = 2.0  # of a pixel of a generated image
OPTIMIZER_BYTES = {"adafactor": 0.1, "adamw8bit": 2, "adamw": 8, "lion8bit": 1, "lion": 4, "prodigy": 16}
OPTIMIZER_BYTES |= {"adamwschedulefree": 8, "sgd": 4}
# Bytes of a weight as it is stored, in NF4 with its share of a scale (trainer/quantized.py).
STORED = {"float8": 1.0, "float8_scaled": 1.0, "int8": 1.0, "nf4": 0.5 + 4 / 64}
AHEAD = 2  # streamed blocks on the GPU at a time
TEXT_TOKENS, TEXT_WIDTH = 512, 4096  # of a family without a shape: as FLUX.1
NOTE = "an estimate; actual use differs by 1–2 GB with the driver and other programs on the GPU"


def estimate(run: Mapping[str, Any]) -> dict:
    """The GPU memory of a run in GB.

    Args:
        run: fields of a RunSpec (the contents of `run.toml`); missing fields have their defaults.

    Returns:
        {"model", "stages_gb": {stage: GB}, "peak_gb", "peak_stage", "parts_gb": the parts of training (as far as
        known), "tiers": {tier: whether its memory is enough}, "note": what the figure is based on}.

    Raises:
        PresetError: there is no such base model.
    """
    key, run, flags, shape = _settled(run)
    stages, parts, note = (_computed if "width" in shape else _from_table)(key, run, flags, shape)
    stages = {name: round(value, 1) for name, value in stages.items()}
    peak = max(stages, key=lambda name: stages[name])
    return {
        "model": key,
        "stages_gb": stages,
        "peak_gb": stages[peak],
        "peak_stage": peak,
        "parts_gb": {name: round(value, 2) for name, value in parts.items()},
        "tiers": {name: stages[peak] <= tier["vram_gb"] for name, tier in tiers().items()},
        "note": note,
    }


def tiers_of(model: str, backend: str | None = None) -> dict[str, dict]:
    """What each tier is for a model with a trainer (None: the model's usual one), the smallest tier first.

    Returns:
        By tier: {label, vram_gb, note, flags, source, needs_gb, basis, problem}.
        flags: those that the tier adds; source: where they come from. needs_gb: GPU memory with the default settings;
        basis: where the figure comes from. problem: "" or why the tier cannot hold the model and which ones can, as a
        sentence; then flags is empty and needs_gb is None.

    Raises:
        PresetError: there is no such model, or the trainer cannot train it.
    """
    key = find_model(model)
    backend = backend or backend_of(key)
    entry, trainer, out = models()[key], trainer_of(key, backend), {}
    for name, tier in tiers().items():
        row = {**tier, "source": trainer["source"], "flags": {}, "needs_gb": None, "basis": trainer["too_small"]}
        own = tier_entry(entry, trainer, name)
        if own is None:
            problem = tier_problem(key, backend, name)
            out[name] = {**row, "note": problem, "problem": problem}
            continue
        row |= {"basis": "", **copy.deepcopy(own), "problem": ""}
        if row["needs_gb"] is None:
            fields = {**entry["settings"], "model": key, "tier": name, "backend": backend}
            row |= {"needs_gb": estimate(fields)["peak_gb"], "basis": NOTE}
        out[name] = row
    return out


Stages = tuple[dict[str, float], dict[str, float], str]  # GB by stage, GB by part of training, the note


def _computed(key: str, run: Mapping[str, Any], flags: Mapping[str, Any], shape: Mapping[str, Any]) -> Stages:
    """The estimate of a family with a shape."""
    parts = _training(run, flags, shape)
    text = (0 if flags.get("text_encoder_cpu") else shape["text_parameters"]) * 2 / GB + OVERHEAD_GB
    pixels = run["batch_size"] * run["resolution"] ** 2 if "vae_batch_size" in flags else run["resolution"] ** 2
    images = shape["vae_parameters"] * 2 / GB + pixels * shape["vae_bytes_per_pixel"] / GB + OVERHEAD_GB
    return {"text": text, "images": images, "training": sum(parts.values())}, parts, NOTE


def _from_table(key: str, run: Mapping[str, Any], flags: Mapping[str, Any], shape: Mapping[str, Any]) -> Stages:
    """The estimate of any other family: its figure for the tier, and what differs from the default settings.

    A tier that cannot hold the family has the figure of the smallest one that can.
    """
    usual = {**defaults()["run"], **models()[key]["settings"]}
    found = tiers_of(key, run["backend"])
    held = [row for row in found.values() if row["needs_gb"] is not None]
    row = found[run["tier"]] if found[run["tier"]]["needs_gb"] is not None else held[0]
    images = trainer_of(key, run["backend"])["activations_gb"]
    size = run["batch_size"] * run["resolution"] ** 2 / (usual["batch_size"] * usual["resolution"] ** 2)
    lora = shape["lora_sides"] * (run["rank"] - usual["rank"]) * (8 + _optimizer_bytes(flags)) / GB
    peak = row["needs_gb"] + images * (size - 1) + lora
    return {"training": peak}, {"images": images * size, "rest": peak - images * size}, f"{row['basis']}; {NOTE}"


def _settled(run: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(model key, the run with its defaults, the trainer's flags that matter here, the model's shape)."""
    base = defaults()
    key = find_model(run.get("model", base["run"]["model"]))
    model = models()[key]
    full = {**base["run"], "backend": backend_of(key), **model["settings"], **run}
    family = families()[model["family"]]
    trainer = trainer_of(key, full["backend"])
    flags = {
        **tier_flags(key, full["backend"], full["tier"]),
        **trainer["flags"],
        **model["flags"],
        **full.get("extra", {}),
    }
    return key, full, flags, {"lora_sides": family.get("lora_sides", 0), **family["shape"], **model["shape"]}


def table_time(run: Mapping[str, Any]) -> tuple[float, float, str]:
    """(seconds of one step, seconds until the first step, source) from the table in defaults.toml."""
    key, run, _, shape = _settled(run)
    speed = defaults()["speed"]
    if models()[key]["generated"]:
        entry = speed["generated"]
        return entry["step_s"] * run["batch_size"] * run["gradient_accumulation"], entry["start_s"], entry["source"]
    tier = speed["tiers"][run["tier"]]
    tokens = (run["resolution"] / 16) ** 2 + shape.get("text_tokens", TEXT_TOKENS)
    tokens *= run["batch_size"] * run["gradient_accumulation"]
    if "width" in shape:
        return tier["s_per_1000_tokens"] * tokens / 1000, speed["start_s"], tier["source"]
    family = families()[models()[key]["family"]]
    memory = tiers()[run["tier"]]["vram_gb"]
    gpu = [row for name, row in speed["other"].items() if tiers()[name]["vram_gb"] <= memory][-1]
    source = f"estimated from the time of FLUX.1 and the size of {family['name']}"
    return gpu["s_per_1000_tokens"] * family["speed"] * tokens / 1000, speed["start_s"], source


def samples_s(run: Mapping[str, Any], prompts: int, step_s: float, steps: int) -> float:
    """Seconds that sample images take: one denoising step is a forward pass, about a third of a training step."""
    every = run.get("sample_every_n_steps") or 0
    one_image_s = step_s / (run["batch_size"] * run["gradient_accumulation"])
    return steps // every * prompts * run["sample_steps"] * one_image_s / 3 if every else 0.0


def whole(run: Mapping[str, Any], images: Mapping[str, int], step_s: float | None = None) -> dict[str, Any]:
    """Time, disk space and cost of a complete run.

    Args:
        images: their number by folder. step_s: seconds of a step as measured; None: those of the table.

    Returns:
        {"steps", "seconds", "time_source", "disk_bytes": {part: bytes}, "cost": None without a price}
    """
    run = _settled(run)[1]
    steps = int(run.get("max_train_steps") or 0) or planned_steps(
        images,
        repeats=run["repeats"],
        batch_size=run["batch_size"],
        epochs=run["epochs"],
        accumulation=run["gradient_accumulation"],
        processes=run["gpus"] * run.get("nodes", 1),
        share=run.get("validation_split", 0.0),
        backend=run["backend"],
    )
    table_s, start_s, source = table_time(run)
    prompts = len(run.get("prompts") or []) or 1
    seconds = start_s + steps * (step_s or table_s) + samples_s(run, prompts, step_s or table_s, steps)
    return {
        "steps": steps,
        "seconds": round(seconds),
        "time_source": "measured in this run" if step_s else source,
        "disk_bytes": disk(run, sum(images.values()), steps),
        "cost": cost(run, seconds),
    }


def cost(run: Mapping[str, Any], seconds: float) -> float | None:
    """What a run of so many seconds costs at its price per hour; None without a price."""
    price = run.get("price_per_hour") or 0.0
    return price * seconds / 3600 if price else None


def disk(run: Mapping[str, Any], images: int, steps: int = 0) -> dict[str, float]:
    """Bytes that a run writes: {"checkpoints": training states, "LoRAs": saved files, "caches": latents and captions,
    "samples": of a run with so many steps}."""
    _, run, flags, shape = _settled(run)
    parameters = run["rank"] * _lora_sides(flags, shape)
    every = run["save_every_n_epochs"]
    by_epoch = 0 if run.get("max_train_steps") or not every else run["epochs"] // every
    state = parameters * (4 + _optimizer_bytes(flags))
    latent = (run["resolution"] / 8) ** 2 * 16 * 4
    text = shape.get("text_tokens", TEXT_TOKENS) * shape.get("text_width", TEXT_WIDTH) * 4
    drawn = run.get("sample_every_n_steps") or 0
    pictures = steps // drawn * (len(run.get("prompts") or []) or 1) if drawn else 0
    return {
        # Of the newest steps and of the newest epochs, and one that is being written before an old one is deleted
        "checkpoints": state * (run["keep_states"] + min(by_epoch, run["keep_states"]) + 1),
        "LoRAs": parameters * (4 if run["mixed_precision"] == "no" else 2) * (by_epoch + run["keep_states"] + 1),
        "caches": images * (latent + text),
        "samples": pictures * run["resolution"] ** 2 * PNG_BYTES,
    }


def _lora_sides(flags: Mapping[str, Any], shape: Mapping[str, Any]) -> int:
    """Inputs + outputs of all layers that the LoRA trains."""
    if "width" not in shape:
        return int(shape["lora_sides"])
    trained = " ".join(flags.get("network_args") or [])
    double = 0 if "train_blocks=single" in trained else shape["double_lora_sides"] * shape["double_blocks"]
    single = 0 if "train_blocks=double" in trained else shape["single_lora_sides"] * shape["single_blocks"]
    return int(double + single)


def _optimizer_bytes(flags: Mapping[str, Any]) -> float:
    return OPTIMIZER_BYTES.get(str(flags.get("optimizer_type", "adamw")).lower(), 8)


def _training(run: Mapping[str, Any], flags: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, float]:
    """The parts of the training stage in GB."""
    compute = 4 if run["mixed_precision"] == "no" else 2
    fp8 = compute == 2 and (flags.get("fp8_base") or flags.get("fp8_base_unet"))
    stored = STORED.get(str(flags.get("quantize") or ("float8" if fp8 else "")), compute)
    double, single = shape["double_parameters"], shape["single_parameters"]
    doubles, singles = shape["double_blocks"], shape["single_blocks"]
    tokens = run["batch_size"] * ((run["resolution"] // 16) ** 2 + shape["text_tokens"])
    row = tokens * shape["width"] * compute
    through = singles if flags.get("split_mode") else doubles + singles
    activations = row * through * (1 if flags.get("gradient_checkpointing") else 34)
    one_block = row * 40 + max(double, single) * compute
    kept = double * doubles + single * singles + shape["other_parameters"]
    if flags.get("split_mode"):  # the other half has neither activations nor a recomputed block beside it
        other_half = double * doubles + shape["other_parameters"]
        kept = max(other_half - (activations + one_block) / stored, single * singles)
    elif flags.get("blocks_to_stream"):
        streamed = int(float(flags["blocks_to_stream"]))
        of_single = min(singles, streamed)
        kept -= (of_single - min(AHEAD, streamed)) * single + min(doubles, streamed - of_single) * double
    elif flags.get("blocks_to_swap"):
        # sd-scripts swaps N // 2 double and twice the rest of single blocks (flux_models.enable_block_swap)
        swapped = int(float(flags["blocks_to_swap"]))
        kept -= min(doubles, swapped // 2) * double + min(singles, (swapped - swapped // 2) * 2) * single
    weights = kept * stored
    if not (flags.get("cache_text_encoder_outputs") or flags.get("cache_text_encoder_outputs_to_disk")):
        weights += shape["text_parameters"] * 2
    lora = run["rank"] * _lora_sides(flags, shape) * (4 + 4 + _optimizer_bytes(flags))
    return {
        "weights": weights / GB,
        "LoRA": lora / GB,
        "activations": activations / GB,
        "one block": one_block / GB,
        "rest": OVERHEAD_GB,
    }
