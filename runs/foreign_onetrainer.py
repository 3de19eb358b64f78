"""Reads a JSON of OneTrainer: a preset, or the configuration that it exports, which has its concepts and samples, too.

A setting that is not in the file has the value that OneTrainer uses then (modules/util/config/TrainConfig.py).
"""

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from runs.files import RunError
from runs.foreign_settings import TABLES, Settings, tables

TABLE = TABLES["onetrainer"]  # what its settings are called here, and their usual values: presets/foreign.toml
REASONS: dict[str, str] = TABLES["ai_toolkit"]["not_taken"]
PARTS = ("unet", "transformer")  # what is trained, which may have a learning rate and a file of its own
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
INTERVALS = {"save_every": "save_every_n_{}s", "sample_after": "sample_every_n_{}s"}  # by step or epoch


def read_onetrainer(out: Settings, table: Mapping[str, Any]) -> None:
    """Add what a configuration sets. RunError: it trains no LoRA, or a kind of base model that is not here."""
    method, model = table.get("training_method", "FINE_TUNE"), table.get("model_type", "STABLE_DIFFUSION_15")
    if method != "LORA":
        raise RunError(f"this configuration trains no LoRA ({str(method)[:40]}); choose one whose method is LORA")
    if not isinstance(model, str) or model not in TABLE["models"]:
        raise RunError(f"model_type: Hangproof has no base model of the kind {str(model)[:40]}")
    out.kind, out.kohya = "a configuration of OneTrainer", False
    out.script, flag, kind = (*TABLE["models"][model].split(), "", "")[:3]
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
    names = TABLE["names"]
    for key, (flag, usual) in TABLE["flags"].items():
        value = given.get(key, usual)
        named, name = usual in names, names.get(value) if isinstance(value, str) else None
        if named and name is None:
            out.refuse(key, value, "Hangproof has no such value; set it by hand")
        elif (out.plain or not key.startswith("lora_")) and (value or key == "learning_rate_warmup_steps"):  # 0: off
            out.add(flag, name if named else value, key)
    keys = TABLE["optimizer_args"].get(given["optimizer"], ()) if isinstance(given["optimizer"], str) else ()
    arguments = [f"{key}={optimizer[key]}" for key in keys if isinstance(optimizer.get(key), int | float)]
    if arguments:
        out.add("optimizer_args", arguments)
    for key, flag in INTERVALS.items():
        if (unit := table.get(f"{key}_unit")) in ("STEP", "EPOCH"):
            out.add(flag.format(unit.lower()), table.get(key), key)
    if isinstance(target := table.get("output_model_destination"), str):
        out.add("output_name", PurePath(target.replace("\\", "/")).stem, "output_model_destination")
    for key, (off, why) in TABLE["not_taken"].items():
        if (value := table.get(key, off)) != off:
            out.refuse(key, value if isinstance(value, str | int | float) else "…", REASONS.get(why, why))
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
