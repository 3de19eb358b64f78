"""Reads the configurations of other trainers: what they set, by the flags of kohya's trainers, which all of them share.

FluxGym's train.sh and dataset.toml, a command, script or `--config_file` of sd-scripts, a command of musubi-tuner, a
JSON of the kohya_ss GUI or of OneTrainer, and a job of ai-toolkit. Everything here is text from elsewhere: it is
parsed and never run, its size is limited, and whatever is wrong with it is a RunError. The names of each trainer, and
what becomes of them, are tables: presets/foreign.toml. runs/foreign_spec.py turns the result into a run.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tomllib

from presets import PresetError, read_table
from presets.training import Training, file_name, trainings
from runs import command, env_file
from runs.files import RunError
from runs.foreign_onetrainer import read_onetrainer
from runs.foreign_settings import TABLES, Settings, number, shown, tables

GUI, JOB = TABLES["kohya_ss"], TABLES["ai_toolkit"]
MAX_BYTES = 1_000_000  # of one file
# a.a.a… = 1, with or without quotes
DEEP_KEY = re.compile(r"""(?<![\w"'\\-])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){100}""")
MAX_SCRIPT = 64_000  # of a script or YAML, which take longer to read; FluxGym's have 3 kB
MAX_FILES = 10
OFF = (None, "", False)  # values that a file can hold for a setting that is off
NO_REGULARIZATION = "Regularization images are not supported; leave them out"
DATA_SET = re.compile(r"^[ \t]*\[\[?(datasets|general)", re.MULTILINE)
READ = (
    "a train.sh and dataset.toml of FluxGym, a JSON of kohya_ss or OneTrainer, a command, script or config TOML of sd-scripts, "
    "a command of musubi-tuner, or a YAML of ai-toolkit"
)


def lines_of(text: str) -> list[str]:
    """Sample prompts: the lines of a file without comments; at most 100."""
    lines = (line.strip() for line in text.splitlines() if not line.startswith("#"))
    return [line[:1000] for line in lines if line][:100]


def read(files: Sequence[tuple[str, str]]) -> Settings:
    """What some files set together, such as a train.sh with its dataset.toml.

    Args:
        files: (name, text); a name is "" for pasted text.

    Raises:
        RunError: a file is too large, cannot be read, or is no configuration that Hangproof knows.
    """
    files = [(name.strip()[:200] or "The text", text) for name, text in files if text.strip()]
    if not files:
        raise RunError(f"There is nothing to import. Paste or choose {READ}")
    if len(files) > MAX_FILES:
        raise RunError(f"{len(files)} files are too many; choose at most {MAX_FILES}")
    out = Settings()
    # Scripts before data sets and prompts: they say what the kind is, and the name of the prompts, which have options.
    for name, text in sorted(files, key=lambda one: (DATA_SET.search(one[1]) is not None, one[0].endswith(".txt"))):
        other = out.kind
        try:
            prompts = file_name((out.flags.get("sample_prompts") or ["sample_prompts.txt"])[0])  # by default as ours
            if file_name(name) == prompts and not name.endswith((".json", ".toml")):  # of tables, for kohya's trainers
                out.prompts = lines_of(text)
            else:
                _read_one(out, name, text.lstrip("\ufeff"))
            if other not in ("", "a config file of sd-scripts", out.kind):
                raise RunError(f"this is {out.kind}, and {other} was given, too; import one at a time")
        except (RunError, RecursionError) as error:
            why = error if isinstance(error, RunError) else "nested too deeply, so it is no configuration"
            raise RunError(f"{name}: {why}") from error
    if not out.kind:
        raise RunError(f"The file has no settings of a training. Choose {READ}")
    return out


def _read_one(out: Settings, name: str, text: str) -> None:
    """Add what one file sets. RunError: it is of an unknown kind, or damaged."""
    short = len(text) <= MAX_SCRIPT
    if len(text) > MAX_BYTES:
        raise RunError(f"larger than {MAX_BYTES // 1000} kB, so it is no configuration")
    if "\0" in text:
        raise RunError("contains a NUL character, so it is no text; choose another file")
    if short and not text.lstrip().startswith("{") and (found := _commands(name, text)):
        read_command(out, found[0])
        out.secrets |= {name: one for name, one in env_file.of_script(text)[1].items() if env_file.is_secret(name)}
        if len(found) > 1:
            out.notes.append(f"{name} has {len(found)} training commands; the first is imported.")
    elif _read_table(out, name, text):
        return
    elif not short:
        raise RunError(f"larger than {MAX_SCRIPT // 1000} kB, so it is no script of a training")
    elif re.search(r"(^|\s)--[A-Za-z]", text) and (found := _commands("", f"train_network.py {text.strip()}")):
        if other := re.search(r"(?<![\w.-])[\w.-]+\.py\b", text):
            raise RunError(f"{other[0]} is no script that Hangproof reads; its options may mean something else")
        read_command(out, found[0])
        out.script = ""
    else:
        raise RunError(f"this is not {READ}. Check that it is complete")


def _commands(name: str, text: str) -> list[Training]:
    """The training commands of a script or a command line. The dialect is that of its name, else of its line ends."""
    script = file_name(name)
    if re.search(r"\^[ \t]*\r?\n", text) and not re.search(r"\\\r?\n", text):
        script = "train.bat"
    elif re.search(r"`\r?\n", text):
        script = "train.ps1"
    text = text.replace("\r\n", "\n") if script != "train.bat" else text
    try:
        return trainings(text, script, plain=True)
    except (PresetError, ValueError, IndexError) as error:
        raise RunError(f"the command cannot be read ({error}); check its quotes") from error


def read_command(out: Settings, t: Training) -> None:
    """Add what a training command sets."""
    path = t.command.words[t.script].shape
    out.script = "trainer" if t.module == "trainer" else file_name(path)
    if out.script == "trainer":
        out.kind = "a script of Hangproof"
    elif "sd-scripts/flux_train_network.py" in path.replace("\\", "/") and not t.module:
        out.kind = "a script of FluxGym"
    else:
        musubi = out.script in read_table("lint.toml")["guarded_scripts"]
        out.kind = f"a command of {'musubi-tuner' if musubi else 'sd-scripts'}"
    count = t.launch.get("num_processes") or t.launch.get("nproc_per_node") or ""
    out.gpus = int(count) if re.fullmatch("[0-9]{1,4}", count) and 1 <= int(count) <= 1024 else 1
    for flag, known in t.flags.items():
        if known.values and None in known.values:
            out.refuse(f"--{flag}", "…", "Its value is known only when the script runs; set it by hand")
        else:
            out.add(flag, [value or "" for value in known.values])
    if t.command.opaque:
        at = next((one.start for one in t.command.words if one.value is None), t.command.end)
        line = t.source.count("\n", 0, at) + 1
        out.notes.append(f"Not understood: line {line}. What it adds to the command is known only when it runs.")
    out.included |= {"config_file"} if t.config else set()
    if config := t.launch.get("config_file"):
        out.notes.append(f"The settings of accelerate in {shown(config)} are not imported; set the GPUs by hand.")


def _read_table(out: Settings, name: str, text: str) -> bool:
    """Add what a file of tables sets: ai-toolkit's have YAML or JSON, kohya_ss's JSON, those of kohya's trainers TOML.

    False where the text is none. RunError: it looks like one, and is damaged.
    """
    import yaml

    kind, parse = "TOML", tomllib.loads
    if text.lstrip().startswith("{"):
        kind, parse = "JSON", json.loads
    elif len(text) <= MAX_SCRIPT and re.search(r"^(job|config)[ \t]*:", text, re.MULTILINE):
        kind, parse = "YAML", yaml.safe_load
    if (kind == "TOML" and DEEP_KEY.search(text)) or (kind == "YAML" and text.count("[") > 1000):
        raise RecursionError  # their parsers take time, and tomllib memory, by the square of the depth
    try:
        if kind == "YAML" and any(isinstance(one, yaml.AliasEvent) for one in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("it has references, such as *name, of which a few can fill all memory; write them out")
        table = parse(text)
        # Half a character and a number of 5,000 digits can be read, but not written.
        json.dumps(table, ensure_ascii=False, default=str).encode()
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        if kind == "TOML" and not name.lower().endswith(".toml") and not re.match(r"\s*(\[|[A-Za-z_]+ *= )", text):
            return False
        raise RunError(f"not valid {kind} ({shown(error)}); correct it, or choose the file again") from error
    if not isinstance(table, dict):
        raise RunError("a configuration is a table of names and values")
    if kind == "YAML" or (kind == "JSON" and isinstance(table.get("config"), dict)):
        read_job(out, table)
    elif kind == "JSON" and "training_method" in table:
        read_onetrainer(out, table)
    elif kind == "JSON":
        read_gui(out, table)
    elif "datasets" in table or "general" in table:
        read_dataset(out, table)
    else:
        out.included.add("config_file")
        out.kind = out.kind or "a config file of sd-scripts"  # flags, some of them in tables whose names mean nothing
        for key, value in table.items():
            for flag, setting in value.items() if isinstance(value, dict) else [(key, value)]:
                if not (out.script and flag in out.flags):  # a command overrides it
                    out.add(flag, setting)
    return True


# Data sets ------------------------------------------------------------------------------------------------------------

# Of a data set or a subset, by the names of sd-scripts and of musubi-tuner: the flag that means the same.
DATASET_FLAGS = {"batch_size": "train_batch_size", "num_repeats": "dataset_repeats"}
FOLDER_KEYS = ("image_dir", "image_directory")
NO_FLAGS = ("subsets", "class_tokens", "cache_directory", "is_reg", *FOLDER_KEYS)


def read_dataset(out: Settings, table: Mapping[str, Any]) -> None:
    """Add what a dataset.toml of sd-scripts or musubi-tuner sets."""
    out.kind = out.kind or "a dataset.toml"
    out.included.add("dataset_config")
    general: dict[str, Any] = found if isinstance(found := table.get("general"), dict) else {}
    usual = {"num_repeats": 1, **general}  # of both trainers
    full = [({**usual, **one}, tables(one.get("subsets")) or [{}]) for one in tables(table.get("datasets"))]
    subsets = [{**one, **subset} for one, inside in full for subset in inside]
    trained = [one for one in subsets if one.get("is_reg") is not True]
    first = trained[0] if trained else general
    for key, value in first.items():
        if key not in NO_FLAGS:
            out.add(DATASET_FLAGS.get(key, key), value, key)
    keys = {key for one in trained for key in one} - {"num_repeats", *NO_FLAGS}
    if differ := sorted(key for key in keys if any(one.get(key) != first.get(key) for one in trained)):
        out.notes.append(f"The subsets differ in {shown(', '.join(differ))}; Hangproof uses what the first one has.")
    folders = {next((one[k] for k in FOLDER_KEYS if isinstance(one.get(k), str)), ""): one for one in reversed(subsets)}
    for path, one in reversed(folders.items()):
        if path and one.get("is_reg") is True:
            out.refuse("is_reg", path, NO_REGULARIZATION)
        elif path:
            out.add_folder(path, one["num_repeats"], one.get("class_tokens"))


# kohya_ss -------------------------------------------------------------------------------------------------------------

CHECKBOXES: dict[str, str] = GUI["checkboxes"]  # that choose a script; without any it is train_network.py
PREFIXES = {f"{box.partition('_')[0]}_": box for box in CHECKBOXES}  # of the fields that belong to one
SILENT = {*GUI["silent"]["fields"], *CHECKBOXES} | {key for keys in GUI["network_args"].values() for key in keys}


def read_gui(out: Settings, table: Mapping[str, Any]) -> None:
    """Add what a JSON of the GUI sets.

    Raises:
        RunError: it is no configuration of the GUI, or one of a training that is no LoRA.
    """
    if "LoRA_type" not in table:
        if "train_data_dir" in table:
            raise RunError("this JSON cannot be imported: it trains no LoRA. Save it on the LoRA tab of kohya_ss")
        raise RunError("this JSON is none of kohya_ss, OneTrainer or ai-toolkit. Enter its values in step 2 by hand")
    if table.get("v2") is True:
        raise RunError("it is for Stable Diffusion 2, which Hangproof does not train")
    on = [name for name in CHECKBOXES if table.get(name) is True]
    out.kind, out.script = "a configuration of kohya_ss", CHECKBOXES[on[-1]] if on else "train_network.py"
    for key, value in table.items():
        if (flag := _flag_of(key, table, on)) and not _is_off(key, value):
            if key in ("optimizer_args", "lr_scheduler_args", "network_weights") and isinstance(value, str):
                value = value.replace('"', "").split()  # lists, which the GUI keeps as texts
            out.add(flag, value, key)
    _schedule(out, table)
    _network(out, table)
    _rest(out, table)


def _flag_of(key: str, table: Mapping[str, Any], on: list[str]) -> str:
    """The flag of a field; "" where it is none, belongs to a family that is not trained, or has no effect."""
    prefix = next((prefix for prefix in PREFIXES if key.startswith(prefix)), "")
    families = [PREFIXES[prefix]] if prefix else [box for box, keys in GUI["only"].items() if key in keys]
    counts = all(table.get(other, wanted) == wanted for other, wanted in GUI["when"].get(key, {}).items())
    if key in SILENT or not counts or (families and families[0] not in on):
        return ""
    return key.removeprefix(prefix) if prefix else str(GUI["renamed"].get(key, key))


def _is_off(key: str, value: object) -> bool:
    zeros = () if key in GUI["zero_counts"] else ("0", "0.0")
    return number(value) in zeros or value in (*OFF, *GUI["usual"].get(key, ()))


def _count(table: Mapping[str, Any], key: str) -> float:
    """A number in a field that can hold text; 0 where it is none."""
    found = command.number(table.get(key))
    return found if abs(found) < 1e12 else 0.0


def _schedule(out: Settings, table: Mapping[str, Any]) -> None:
    """The length and the learning rates, of which each has several fields."""
    keys = ("max_train_steps", "max_train_epochs", "learning_rate", "unet_lr", "text_encoder_lr")
    steps, epochs, rate, unet, text = (_count(table, key) for key in keys)
    out.flags.pop("max_train_epochs", None)
    key = "max_train_epochs" if epochs > 0 else "epoch"
    if (epochs > 0 or steps <= 0) and (epochs := _count(table, key)) > 0:
        out.add("max_train_epochs", [int(epochs)], key)
    if not rate:
        out.flags.pop("learning_rate", None)
    if unet and unet != rate:
        out.add("unet_lr" if rate else "learning_rate", table["unet_lr"], "unet_lr")
    if text:
        out.add("text_encoder_lr", table["text_encoder_lr"])
    elif unet:  # the GUI trains only the U-Net when only it has a rate
        out.add("network_train_unet_only", True)


def _network(out: Settings, table: Mapping[str, Any]) -> None:
    """The LoRA's type, which is a module with arguments."""
    kind = table.get("LoRA_type")
    module = GUI["networks"].get(kind) if isinstance(kind, str) else None
    if module is None:
        why = f"LoRAs of the type {shown(kind)} need the package lycoris-lora; Hangproof trains a plain LoRA instead"
        out.refuse("LoRA_type", kind, why)
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


def _rest(out: Settings, table: Mapping[str, Any]) -> None:
    """The warm-up, prompts, the image folder, attention, GPUs, and the text field with other flags."""
    share = _count(table, "lr_warmup")
    if table.get("lr_scheduler") == "constant":
        out.flags.pop("lr_warmup_steps", None)
    elif share > 0 and "lr_warmup_steps" not in out.flags:  # a percentage of the run
        out.add("lr_warmup_steps", f"{min(share, 99) / 100:g}", "lr_warmup")
    attention, texts = table.get("xformers"), {key: value for key, value in table.items() if isinstance(value, str)}
    if attention in ("xformers", "sdpa", True):
        out.add("sdpa" if attention == "sdpa" else "xformers", True)
    out.prompts = lines_of(texts.get("sample_prompts", "")) or out.prompts
    count = _count(table, "num_processes")
    out.gpus = int(count) if table.get("multi_gpu") is True and 1 <= count <= 1024 else 1
    path = texts.get("train_data_dir", "").strip()
    named = re.match(r"\s*trigger(?: words?)?\s*:\s*(.+)", texts.get("training_comment", ""), re.IGNORECASE)
    if path or named:
        out.add_folder(path, None, named and named[1])
    for training in trainings(f"train_network.py {texts.get('additional_parameters', '')[:MAX_SCRIPT]}"):
        for flag, known in training.flags.items():
            out.add(flag, [value or "" for value in known.values])


# ai-toolkit -----------------------------------------------------------------------------------------------------------


def read_job(out: Settings, table: Mapping[str, Any]) -> None:
    """Add what a job sets. RunError: it has no process."""
    config = found if isinstance(found := table.get("config"), dict) else {}
    first = found[0] if isinstance(found := config.get("process"), list) and found else None
    if not isinstance(first, dict):
        raise RunError("no job of ai-toolkit; it has a table “config” with a list “process”")
    if not isinstance(first.get("network"), dict) or not str(first.get("type", "trainer")).endswith("trainer"):
        raise RunError(f"this job trains no LoRA ({shown(first.get('type'))}); choose one with a “network”")
    out.kind, out.kohya = "a job of ai-toolkit", False
    out.add("output_name", config.get("name"), "name")
    parts = {name: part for name, part in first.items() if isinstance(name, str) and isinstance(part, dict)}
    datasets = tables(first.get("datasets"))[:100]
    trained = [one for one in datasets if not one.get("is_reg")]
    parts["datasets"] = {key: value for one in reversed(trained) for key, value in one.items()}
    for place, flag in JOB["flags"].items():
        name, _, key = place.partition(".")
        if key in parts.get(name, {}) and flag not in out.flags:
            value = parts[name][key]
            out.add(flag, JOB["precisions"].get(str(value)) if flag == "mixed_precision" else value, place)
    out.script, flag, kind = (*_job_script(parts.get("model", {})).split(), "", "")[:3]
    out.add(flag, kind, "model.arch")
    given = found if isinstance(found := parts.get("sample", {}).get("prompts"), list) else []
    texts = (one.get("prompt") if isinstance(one, dict) else one for one in given)
    out.add_prompts(texts, str(first.get("trigger_word") or "[trigger]"))
    for one in (one for one in datasets if one not in trained):
        out.refuse("datasets.is_reg", one.get("folder_path"), NO_REGULARIZATION)
    _job_folders(out, trained, first.get("trigger_word"))
    for name, part in parts.items():
        for key, value in part.items():
            place = f"{name}.{key}"
            taken = place in (*JOB["flags"], *JOB["read"]) or value in OFF or JOB["usual"].get(place) == value
            if not taken and len(out.rows) < 300:
                why = JOB["not_taken"].get(place, "Hangproof has no such setting, or sets it by the base model")
                out.refuse(place, value if isinstance(value, str | int | float) else "…", why)


def _job_folders(out: Settings, datasets: list[dict[str, Any]], trigger: object) -> None:
    """The folders of images, the resolution and the trigger word."""
    for one in datasets:
        path, sides = one.get("folder_path"), one.get("resolution")
        if isinstance(path, str) and path:
            out.add_folder(path, one.get("num_repeats"), trigger)
        sides = sides if isinstance(sides, list) else [sides]
        if sides and isinstance(sides[-1], int) and "resolution" not in out.flags:
            out.add("resolution", out.largest(sides), "datasets.resolution")
    if isinstance(trigger, str) and trigger.strip() and not out.folders:
        out.add_folder("", None, trigger)


def _job_script(model: Mapping[str, Any]) -> str:
    """The training script of a base model, and a flag that tells it. RunError: Hangproof does not train this kind."""
    arch, named = model.get("arch"), [str(key)[3:] for key, on in model.items() if on and str(key).startswith("is_")]
    known = arch if isinstance(arch, str) else (named or ["sd1"])[0]
    if not (script := JOB["architectures"].get(known.partition(":")[0].lower())):
        raise RunError(f"model.arch: Hangproof has no base model of the kind {shown(known)}")
    return str(script)
