"""Reads a JSON of OneTrainer: a preset, or the configuration that it exports, which has its concepts and samples, too.

A setting that is not in the file has the value that OneTrainer uses then (modules/util/config/TrainConfig.py).
"""

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from runs.files import RunError
from runs.foreign_settings import TABLES, Settings, tables

# model_type: the training script, and a flag that tells the model.
MODELS = {
    "STABLE_DIFFUSION_15": "train_network.py",
    "STABLE_DIFFUSION_XL_10_BASE": "sdxl_train_network.py",
    "STABLE_DIFFUSION_35": "sd3_train_network.py",
    "FLUX_DEV_1": "flux_train_network.py",
    "FLUX_2": "flux_2_train_network.py",
    "CHROMA_1": "flux_train_network.py model_type chroma",
    "QWEN": "qwen_image_train_network.py",
    "ANIMA": "anima_train_network.py",
    "KREA_2": "krea2_train_network.py",
    "Z_IMAGE": "zimage_train_network.py",
}
# A setting: the flag, and what OneTrainer uses where the file has none.
FLAGS: dict[str, tuple[str, Any]] = {
    "base_model_name": ("pretrained_model_name_or_path", ""),
    "lora_rank": ("network_dim", 16),
    "lora_alpha": ("network_alpha", 1.0),
    "dropout_probability": ("network_dropout", 0.0),
    "batch_size": ("train_batch_size", 1),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "epochs": ("max_train_epochs", 100),
    "resolution": ("resolution", "512"),
    "learning_rate": ("learning_rate", 3e-6),
    "learning_rate_warmup_steps": ("lr_warmup_steps", 200),
    "clip_grad_norm": ("max_grad_norm", 1.0),
    "offset_noise_weight": ("noise_offset", 0.0),
    "optimizer": ("optimizer_type", "ADAMW"),
    "learning_rate_scheduler": ("lr_scheduler", "CONSTANT"),
    "train_dtype": ("mixed_precision", "FLOAT_16"),
}
# Its names of optimizers, schedulers and precisions: all values of a setting whose usual one is here.
# It warms up whatever the scheduler is.
NAMES = {
    "ADAMW": "AdamW",
    "ADAMW_8BIT": "AdamW8bit",
    "ADAFACTOR": "Adafactor",
    "LION": "Lion",
    "LION_8BIT": "Lion8bit",
    "PRODIGY": "Prodigy",
    "SCHEDULE_FREE_ADAMW": "AdamWScheduleFree",
    "CONSTANT": "constant_with_warmup",
    "LINEAR": "linear",
    "COSINE": "cosine",
    "COSINE_WITH_HARD_RESTARTS": "cosine_with_restarts",
    "BFLOAT_16": "bf16",
    "FLOAT_16": "fp16",
    "FLOAT_32": "no",
    "TFLOAT_32": "no",
}
OPTIMIZER_ARGS = {
    "ADAMW": ("weight_decay",),
    "ADAMW_8BIT": ("weight_decay",),
    "ADAFACTOR": ("scale_parameter", "relative_step", "warmup_init", "weight_decay"),
    "PRODIGY": ("weight_decay", "d_coef", "decouple", "use_bias_correction", "safeguard_warmup"),
}
REASONS: dict[str, str] = TABLES["ai_toolkit"]["not_taken"]
PLAIN, BY_MODEL = REASONS["network.type"], REASONS["train.noise_scheduler"]
# A setting that is not taken over: its usual value, which needs no word, and the reason.
NOT_TAKEN = {
    "peft_type": ("LORA", PLAIN),
    "lora_decompose": (False, PLAIN),
    "layer_filter_preset": ("full", "Hangproof trains the layers of kohya's LoRAs"),
    "ema": ("OFF", REASONS["train.ema_config"]),
    "loss_weight_fn": ("CONSTANT", "Set it by hand in “All trainer options”"),
    "timestep_distribution": ("UNIFORM", BY_MODEL),
    "timestep_shift": (1.0, BY_MODEL),
    "dynamic_timestep_shifting": (False, BY_MODEL),
    "masked_training": (False, "A mask is used where an image has one"),
}
PARTS = ("unet", "transformer")  # what is trained, which may have a learning rate and a file of its own
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
INTERVALS = {"save_every": "save_every_n_{}s", "sample_after": "sample_every_n_{}s"}  # by step or epoch


def read_onetrainer(out: Settings, table: Mapping[str, Any]) -> None:
    """Add what a configuration sets. RunError: it trains no LoRA, or a kind of base model that is not here."""
    method, model = table.get("training_method", "FINE_TUNE"), table.get("model_type", "STABLE_DIFFUSION_15")
    if method != "LORA":
        raise RunError(f"this configuration trains no LoRA ({str(method)[:40]}); choose one whose method is LORA")
    if not isinstance(model, str) or model not in MODELS:
        raise RunError(f"model_type: Hangproof has no base model of the kind {str(model)[:40]}")
    out.kind, out.kohya = "a configuration of OneTrainer", False
    out.script, flag, kind = (*MODELS[model].split(), "", "")[:3]
    out.add(flag, kind, "model_type")
    out.plain = table.get("peft_type", "LORA") == "LORA"
    optimizer = found if isinstance(found := table.get("optimizer"), dict) else {}
    given = {**table, "optimizer": optimizer.get("optimizer", "ADAMW")}
    for part in PARTS:
        trained = found if isinstance(found := table.get(part), dict) else {}
        if trained.get("learning_rate") is not None:
            given["learning_rate"] = trained["learning_rate"]
        file = trained.get("model_name")
        if file and not str(file).endswith(".gguf"):  # which has the base model in fewer bits
            given["base_model_name"] = file
    sides = str(given.get("resolution", "")).split(",")
    if len(sides) > 1 and all(re.fullmatch(r"\s*[0-9]{1,5}\s*", side) for side in sides):
        given["resolution"] = out.largest(list(map(int, sides)))
    for key, (flag, usual) in FLAGS.items():
        value = given.get(key, usual)
        named, name = usual in NAMES, NAMES.get(value) if isinstance(value, str) else None
        if named and name is None:
            out.refuse(key, value, "Hangproof has no such value; set it by hand")
        elif (out.plain or not key.startswith("lora_")) and (value or key == "learning_rate_warmup_steps"):  # 0: off
            out.add(flag, name if named else value, key)
    keys = OPTIMIZER_ARGS.get(given["optimizer"], ()) if isinstance(given["optimizer"], str) else ()
    arguments = [f"{key}={optimizer[key]}" for key in keys if isinstance(optimizer.get(key), int | float)]
    if arguments:
        out.add("optimizer_args", arguments)
    for key, flag in INTERVALS.items():
        if (unit := table.get(f"{key}_unit")) in ("STEP", "EPOCH"):
            out.add(flag.format(unit.lower()), table.get(key), key)
    if isinstance(target := table.get("output_model_destination"), str):
        out.add("output_name", PurePath(target.replace("\\", "/")).stem, "output_model_destination")
    for key, (off, why) in NOT_TAKEN.items():
        if (value := table.get(key, off)) != off:
            out.refuse(key, value if isinstance(value, str | int | float) else "…", why)
    for part in TEXT_ENCODERS:
        if isinstance(own := table.get(part), dict) and own.get("train") is True:
            out.refuse(f"{part}.train", "true", REASONS["train.train_text_encoder"])
    out.add_prompts(one.get("prompt") for one in _enabled(table, "samples"))
    _concepts(out, table)


def _concepts(out: Settings, table: Mapping[str, Any]) -> None:
    """The folders of images. Without any, the file is a preset, or OneTrainer keeps them in another file."""
    for one in _enabled(table, "concepts"):
        path, repeats = one.get("path"), one.get("balancing", 1)
        if not isinstance(path, str) or not path:
            continue
        if one.get("type", "STANDARD") != "STANDARD":
            out.refuse("concepts.type", path, "Only images that are trained are taken over; leave these out")
            continue
        whole = isinstance(repeats, int | float) and one.get("balancing_strategy", "REPEATS") == "REPEATS"
        out.add_folder(path, round(repeats) if whole and 1 <= repeats < 1e6 else None)
    if not out.folders:
        out.notes.append("The file names no images: OneTrainer keeps its concepts apart. Add the images in step 1.")


def _enabled(table: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The tables of a list that are switched on."""
    return [one for one in tables(table.get(key)) if one.get("enabled", True)]
