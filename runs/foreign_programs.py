"""The files of two other programs as flags of kohya's trainers: a JSON of the kohya_ss GUI, and a job of ai-toolkit.

The GUI saves its fields, not flags: this file does what `train_model` in bmaltais/kohya_ss, kohya_gui/lora_gui.py, does
when it writes them as flags. Fields of older versions (in its presets/lora) have their present meaning. Empty text, 0
and false mean that a field is off, as there.

The names of a job (YAML or JSON) are those of ostris/ai-toolkit, config/examples/train_lora_flux_24gb.yaml. Only plain
values at known places are used: a file with references to itself costs nothing.
"""

import re
from collections.abc import Mapping
from typing import Any

from presets.training import trainings
from runs.files import RunError
from runs.foreign_settings import OFF, TABLES, Settings, lines_of, number, shown, tables

# kohya_ss --------------------------------------------------------------------------------------------------------------

GUI = TABLES["kohya_ss"]
CHECKBOXES: dict[str, str] = GUI["checkboxes"]  # that choose a script; without any it is train_network.py
SILENT = {*GUI["silent"]["fields"], *CHECKBOXES}
# Of these fields, 0 is a value; the GUI leaves a 0 of the others out.
ZERO_COUNTS = ("learning_rate", "seed", "max_data_loader_n_workers", "guidance_scale", "network_alpha")
LYCORIS = "LoRAs of the type {kind} need the package lycoris-lora; Hangproof trains a plain LoRA instead"


def read_gui(out: Settings, label: str, table: Mapping[str, Any]) -> None:
    """Add what a JSON of the GUI sets.

    Raises:
        RunError: it is no configuration of the GUI, or one of a training that is no LoRA.
    """
    if "LoRA_type" not in table:
        known = "train_data_dir" in table or "pretrained_model_name_or_path" in table
        why = "it trains no LoRA" if known else "it is none of kohya_ss"
        raise RunError(f"{label}: this JSON cannot be imported: {why}. Save it on the LoRA tab of kohya_ss")
    if table.get("v2") is True:
        raise RunError(f"{label}: it is for Stable Diffusion 2, which Hangproof does not train")
    on = [name for name in CHECKBOXES if table.get(name) is True]
    out.kind, out.script = "a configuration of kohya_ss", CHECKBOXES[on[-1]] if on else "train_network.py"
    for key, value in table.items():
        if (flag := _flag_of(key, table, on)) and not _is_off(key, value):
            out.add(flag, _text(key, value), key)
    _length(out, table)
    _rates(out, table)
    _network(out, table)
    _warm_up(out, table)
    _rest(out, table)


def _flag_of(key: str, table: Mapping[str, Any], on: list[str]) -> str:
    """The flag of a field; "" where it is none, belongs to a family that is not trained, or has no effect."""
    prefix = next((prefix for prefix in GUI["prefixes"] if key.startswith(prefix)), "")
    families = [GUI["prefixes"][prefix]] if prefix else [box for box, keys in GUI["only"].items() if key in keys]
    counts = all(table.get(other, wanted) == wanted for other, wanted in GUI["when"].get(key, {}).items())
    if key in SILENT or not counts or (families and families[0] not in on):
        return ""
    return key.removeprefix(prefix) if prefix else str(GUI["renamed"].get(key, key))


def _is_off(key: str, value: object) -> bool:
    unused = value in ("", None, False) or value in GUI["usual"].get(key, ())
    return unused or (key not in ZERO_COUNTS and number(value) in ("0", "0.0"))


def _text(key: str, value: object) -> object:
    """Lists, which the GUI keeps as texts, as lists."""
    if key in ("optimizer_args", "lr_scheduler_args", "network_weights") and isinstance(value, str):
        return value.replace('"', "").split()
    return value


def _count(table: Mapping[str, Any], key: str) -> float:
    """A number in a field that can hold text; 0 where it is none."""
    try:
        found = float(str(table.get(key)))
    except ValueError:
        return 0.0
    return found if abs(found) < 1e12 else 0.0


def _length(out: Settings, table: Mapping[str, Any]) -> None:
    """`max_train_steps`, else `max_train_epochs`, else `epoch`."""
    out.flags.pop("max_train_epochs", None)
    key = "max_train_epochs" if _count(table, "max_train_epochs") > 0 else "epoch"
    if _count(table, "max_train_steps") <= 0 < (epochs := _count(table, key)):
        out.add("max_train_epochs", [int(epochs)], key)


def _rates(out: Settings, table: Mapping[str, Any]) -> None:
    """The learning rates. The GUI trains only the U-Net when only it has a rate."""
    rate, unet, text = (_count(table, key) for key in ("learning_rate", "unet_lr", "text_encoder_lr"))
    if not rate:
        out.flags.pop("learning_rate", None)
    if unet and unet != rate:
        out.add("unet_lr" if rate else "learning_rate", table["unet_lr"], "unet_lr")
    if text:
        out.add("text_encoder_lr", table["text_encoder_lr"])
    elif unet:
        out.add("network_train_unet_only", True)


def _network(out: Settings, table: Mapping[str, Any]) -> None:
    """The LoRA's type, which is a module with arguments."""
    kind = table.get("LoRA_type")
    module = GUI["networks"].get(kind) if isinstance(kind, str) else None
    if module is None:
        out.refuse("LoRA_type", kind, LYCORIS.format(kind=shown(kind)))
        for key in ("network_dim", "network_alpha"):  # a LoKr has 100000 where a LoRA has 16
            if values := out.flags.pop(key, None):
                out.refuse(key, values[0], "It means something else in a plain LoRA; set it by hand")
        out.plain = False
        return
    if table.get("sd3_checkbox") is True and module == "networks.lora":
        module = "networks.lora_sd3"
    out.add("network_module", module, "LoRA_type")
    rows = GUI["network_args"]
    keys = [key for key in (*rows["every"], *rows.get(kind, ())) if key in table and not _is_off(key, table[key])]
    arguments = [f"{key}={number(table[key])}" for key in keys]
    if arguments and all(re.fullmatch(r"[\w.,=+-]+", word) for word in arguments):
        out.add("network_args", arguments)


def _warm_up(out: Settings, table: Mapping[str, Any]) -> None:
    """The scheduler's warm-up, which can be a percentage of the run."""
    share = _count(table, "lr_warmup")
    if table.get("lr_scheduler") == "constant":
        out.flags.pop("lr_warmup_steps", None)
    elif share > 0 and "lr_warmup_steps" not in out.flags:
        out.add("lr_warmup_steps", f"{min(share, 99) / 100:g}", "lr_warmup")


def _rest(out: Settings, table: Mapping[str, Any]) -> None:
    """Prompts, the image folder, attention, GPUs, and the text field with other flags."""
    attention, texts = table.get("xformers"), {key: value for key, value in table.items() if isinstance(value, str)}
    if attention in ("xformers", "sdpa", True):
        out.add("sdpa" if attention == "sdpa" else "xformers", True)
    if "sample_prompts" in texts:
        out.prompts = lines_of(texts["sample_prompts"])
    count = _count(table, "num_processes")
    out.gpus = int(count) if table.get("multi_gpu") is True and 1 <= count <= 1024 else 1
    path = texts.get("train_data_dir", "").strip()
    named = re.match(r"\s*trigger(?: words?)?\s*:\s*(.+)", texts.get("training_comment", ""), re.IGNORECASE)
    if path or named:
        out.add_folder(path, None, named and named[1])
    for training in trainings(f"train_network.py {texts.get('additional_parameters', '')}"):
        for flag, known in training.flags.items():
            out.add(flag, [value or "" for value in known.values])


# ai-toolkit ------------------------------------------------------------------------------------------------------------

JOB = TABLES["ai_toolkit"]
USED = (*JOB["flags"], "model.arch", "model.is_flux", "model.is_xl", "sample.prompts")  # read below
OTHER = "Hangproof has no such setting, or sets it by the base model"


def read_job(out: Settings, label: str, table: Mapping[str, Any]) -> None:
    """Add what a job sets. RunError: it has no process."""
    config = table.get("config")
    processes = config.get("process") if isinstance(config, dict) else None
    first = processes[0] if isinstance(processes, list) and processes else None
    if not isinstance(config, dict) or not isinstance(first, dict):
        raise RunError(f"{label}: no job of ai-toolkit; it has a table “config” with a list “process”")
    out.kind = "a job of ai-toolkit"
    out.add("output_name", config.get("name"), "name")
    parts = {name: part for name, part in first.items() if isinstance(name, str) and isinstance(part, dict)}
    for place, flag in JOB["flags"].items():
        name, _, key = place.partition(".")
        if key in parts.get(name, {}) and flag not in out.flags:
            value = parts[name][key]
            out.add(flag, JOB["precisions"].get(str(value)) if flag == "mixed_precision" else value, place)
    out.script = _job_script(parts.get("model", {}))
    given = parts.get("sample", {}).get("prompts")
    texts = [one.get("prompt") if isinstance(one, dict) else one for one in given] if isinstance(given, list) else []
    out.prompts = [" ".join(text.split())[:1000] for text in texts if isinstance(text, str) and text.strip()][:100]
    _job_folders(out, tables(first.get("datasets"))[:100], first.get("trigger_word"))
    for name, part in parts.items():
        for key, value in part.items():
            place = f"{name}.{key}"
            taken = place in USED or value in OFF or (name, value) == ("network", "lora")
            if not taken and len(out.rows) < 300:
                text = value if isinstance(value, str | int | float) else "…"
                out.refuse(place, text, JOB["not_taken"].get(place, OTHER))


def _job_folders(out: Settings, datasets: list[dict[str, Any]], trigger: object) -> None:
    for one in datasets:
        path, sides = one.get("folder_path"), one.get("resolution")
        if isinstance(path, str) and path:
            out.add_folder(path, one.get("num_repeats"), trigger)
        sides = sides if isinstance(sides, list) else [sides]
        if sides and isinstance(sides[-1], int) and "resolution" not in out.flags:
            out.add("resolution", max(s for s in sides if isinstance(s, int)), "datasets.resolution")
            if len(sides) > 1:
                out.notes.append("The data set is trained at several resolutions; Hangproof trains at the largest one.")
    if isinstance(trigger, str) and trigger.strip() and not out.folders:
        out.add_folder("", None, trigger)


def _job_script(model: Mapping[str, Any]) -> str:
    """The training script of a base model. RunError: it is of a kind that Hangproof does not train."""
    scripts, arch = JOB["architectures"], model.get("arch")
    known = arch if isinstance(arch, str) else next((key for key in scripts if model.get(f"is_{key}")), None)
    if known is None:
        return "train_network.py"
    script = str(scripts.get(known.partition(":")[0].lower(), ""))
    if known and not script:
        raise RunError(f"model.arch: Hangproof has no base model of the kind {shown(known)}")
    return script
