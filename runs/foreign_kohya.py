"""A JSON of the kohya_ss GUI as flags of sd-scripts.

The GUI saves its fields, not flags: this file does what `train_model` in bmaltais/kohya_ss, kohya_gui/lora_gui.py, does
when it writes them as flags. Fields of older versions (in its presets/lora) have their present meaning. Empty text, 0
and false mean that a field is off, as there.
"""

import re
from collections.abc import Mapping
from typing import Any

from presets.training import trainings
from runs.files import RunError
from runs.foreign_settings import TABLES, Settings, add_flag, add_value, lines_of, number, shown

NAMES = TABLES["kohya_ss"]
SCRIPTS: dict[str, str] = NAMES["checkboxes"]  # without any it is train_network.py
SILENT = {*NAMES["silent"]["fields"], *SCRIPTS}
NUMBERS_OFF = ("0", "0.0")  # of text fields; the GUI leaves these out
LYCORIS = "LoRAs of the type {kind} need the package lycoris-lora; Hangproof trains a plain LoRA instead"


def read_gui(out: Settings, label: str, table: Mapping[str, Any]) -> None:
    """Add what a JSON of the GUI sets.

    Raises:
        RunError: it is no configuration of the GUI, or one of a training that is no LoRA.
    """
    if not ({"LoRA_type", "network_dim", "pretrained_model_name_or_path"} & table.keys()) or "LoRA_type" not in table:
        known = "train_data_dir" in table or "pretrained_model_name_or_path" in table
        why = "it trains no LoRA" if known else "it is none of kohya_ss"
        raise RunError(f"{label}: this JSON cannot be imported: {why}. Save it on the LoRA tab of kohya_ss")
    out.kind = "a configuration of kohya_ss"
    on = [name for name in SCRIPTS if table.get(name) is True]
    if table.get("v2") is True:
        raise RunError(f"{label}: it is for Stable Diffusion 2, which Hangproof does not train")
    out.script = SCRIPTS[on[-1]] if on else "train_network.py"
    for key, value in table.items():
        flag = _flag_of(key, on) if _counts(key, table) else ""
        if flag and not _is_off(key, value):
            add_value(out, flag, _text(key, value), key)
    _length(out, table)
    _rates(out, table)
    _network(out, table)
    _warm_up(out, table)
    _rest(out, table)


def _flag_of(key: str, on: list[str]) -> str:
    """The flag of a field; "" where it is none, or belongs to a family that is not trained."""
    if key in SILENT or not isinstance(key, str):
        return ""
    for prefix, family in NAMES["prefixes"].items():
        if key.startswith(prefix):
            return key.removeprefix(prefix) if family in on else ""
    owner = next((family for family, keys in NAMES["only"].items() if key in keys), None)
    if owner and owner not in on:
        return ""
    return str(NAMES["renamed"].get(key, key))


def _counts(key: str, table: Mapping[str, Any]) -> bool:
    """Whether the fields that decide about a field have the value with which it has an effect."""
    return all(table.get(other, wanted) == wanted for other, wanted in NAMES["when"].get(key, {}).items())


def _is_off(key: str, value: object) -> bool:
    if value in ("", None, False) or value in NAMES["usual"].get(key, ()):
        return True
    kept = ("learning_rate", "seed", "max_data_loader_n_workers", "guidance_scale", "network_alpha")
    return key not in kept and number(value) in NUMBERS_OFF


def _text(key: str, value: object) -> object:
    """Lists, which the GUI keeps as texts, as lists."""
    if key in ("optimizer_args", "lr_scheduler_args", "network_weights") and isinstance(value, str):
        return value.replace('"', "").split()
    return value


def _count(value: object) -> float:
    """A number in a field that can hold text; 0 where it is none."""
    try:
        found = float(str(value))
    except ValueError:
        return 0.0
    return found if abs(found) < 1e12 else 0.0


def _length(out: Settings, table: Mapping[str, Any]) -> None:
    """`max_train_steps`, else `max_train_epochs`, else `epoch`."""
    steps, epochs = _count(table.get("max_train_steps")), _count(table.get("max_train_epochs"))
    out.flags.pop("max_train_epochs", None)
    if steps > 0:
        return
    if epochs <= 0:
        epochs, out.labels["max_train_epochs"] = _count(table.get("epoch")), "epoch"
    if epochs > 0:
        add_flag(out, "max_train_epochs", [str(int(epochs))])


def _rates(out: Settings, table: Mapping[str, Any]) -> None:
    """The learning rates. The GUI trains only the U-Net when only it has a rate."""
    rate, unet, text = (_count(table.get(key)) for key in ("learning_rate", "unet_lr", "text_encoder_lr"))
    if not rate:
        out.flags.pop("learning_rate", None)
        if unet:
            out.labels["learning_rate"] = "unet_lr"
            add_flag(out, "learning_rate", [number(table["unet_lr"])])
    elif unet and unet != rate:
        add_flag(out, "unet_lr", [number(table["unet_lr"])])
    if text:
        add_flag(out, "text_encoder_lr", [number(table["text_encoder_lr"])])
    elif unet:
        add_flag(out, "network_train_unet_only", [])


def _network(out: Settings, table: Mapping[str, Any]) -> None:
    """The LoRA's type, which is a module with arguments."""
    kind = table.get("LoRA_type")
    module = NAMES["networks"].get(kind) if isinstance(kind, str) else None
    if module is None:
        out.refuse("LoRA_type", kind, LYCORIS.format(kind=shown(kind)))
        for key in ("network_dim", "network_alpha"):  # a LoKr has 100000 where a LoRA has 16
            if values := out.flags.pop(key, None):
                out.refuse(key, values[0], "It means something else in a plain LoRA; set it by hand")
        out.plain = False
        return
    if table.get("sd3_checkbox") is True and module == "networks.lora":
        module = "networks.lora_sd3"
    out.labels["network_module"] = "LoRA_type"
    add_flag(out, "network_module", [module])
    rows = NAMES["network_args"]
    keys = [key for key in (*rows["every"], *rows.get(kind, ())) if key in table and not _is_off(key, table[key])]
    arguments = [f"{key}={number(table[key])}" for key in keys]
    if arguments and all(re.fullmatch(r"[\w.,=+-]+", word) for word in arguments):
        add_flag(out, "network_args", arguments)


def _warm_up(out: Settings, table: Mapping[str, Any]) -> None:
    """The scheduler's warm-up, which can be a percentage of the run."""
    share = _count(table.get("lr_warmup"))
    if table.get("lr_scheduler") == "constant":
        out.flags.pop("lr_warmup_steps", None)
    elif share > 0 and "lr_warmup_steps" not in out.flags:
        out.labels["lr_warmup_steps"] = "lr_warmup"
        add_flag(out, "lr_warmup_steps", [f"{min(share, 99) / 100:g}"])


def _rest(out: Settings, table: Mapping[str, Any]) -> None:
    """Prompts, the image folder, attention, GPUs, and the text field with other flags."""
    attention = table.get("xformers")
    if attention in ("xformers", True):
        add_flag(out, "xformers", [])
    elif attention == "sdpa":
        add_flag(out, "sdpa", [])
    if isinstance(table.get("sample_prompts"), str):
        out.prompts = lines_of(table["sample_prompts"])
    count = _count(table.get("num_processes"))
    out.gpus = int(count) if table.get("multi_gpu") is True and 1 <= count <= 1024 else 1
    comment = table.get("training_comment")
    named = re.match(r"\s*trigger(?: words?)?\s*:\s*(.+)", comment, re.IGNORECASE) if isinstance(comment, str) else None
    path = table.get("train_data_dir")
    if (isinstance(path, str) and path.strip()) or named:
        out.add_folder(path.strip() if isinstance(path, str) else "", None, named and named[1])
    if isinstance(text := table.get("additional_parameters"), str):
        for training in trainings(f"train_network.py {text}"):
            for flag, known in training.flags.items():
                add_flag(out, flag, [value or "" for value in known.values])
