"""A foreign configuration as a run of Hangproof: what each of its settings becomes, and why.

Nothing is taken over blindly: the base model is found by its file, the VRAM choice by the optimizer and the machine,
flags that are known to hang are dropped (presets/lint.toml), and what Hangproof sets anyway is not repeated. The result
is checked like any run. Every setting of the file ends in exactly one row.
"""

import copy
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import presets
from presets import lint, read_table
from presets.syntax import Command, Word
from presets.training import Flag, Training, file_name
from runs import env_file
from runs.command import flags as ours_of, tier_flags
from runs.fields import LABELS, MACHINES
from runs.files import RunError
from runs.flags import flag_faults, flag_value, known_flags
from runs.foreign_settings import TABLES, Row, Settings, number, shown
from runs.paths import CHECKOUTS, outputs_dir
from runs.scripts import INSTALL
from runs.spec import ALIASES, RESERVED_FLAGS, RunSpec, make

WORDS = {**LABELS, "keep_tokens": "keep_tokens"}
FLAG_OF = {key: flag for flag, key in ALIASES.items()} | {"name": "output_name", "control_dir": "control_directory"}
# No other trainer has those of the machines, such as a store, which gets the images
SET_OTHERWISE = ("model", "tier", "backend", "prompts", "trigger", *(field.key for field in MACHINES))
FIELDS = {FLAG_OF.get(key, key): key for key in RunSpec.model_fields if key in WORDS.keys() - {*SET_OTHERWISE}}
SECRET = "A secret: kept apart, in a file that only you can read. Not yours? Remove it from the extra trainer options"
SDPA = "Computed with PyTorch's own attention (--sdpa), which gives the same result"
# What becomes of a flag of this name, whatever its value: its outcome and the reason.
DECIDED = {flag: ("changed", SDPA) for flag in ("xformers", "mem_eff_attn")}
DECIDED |= {flag: ("run", "The run's own folder is used") for flag in RESERVED_FLAGS}
for table, outcome in (("by_hangproof", "run"), ("not_here", "unsupported")):
    DECIDED |= {flag: (outcome, reason) for reason, flags in TABLES[table].items() for flag in flags}
TRAINER_DEFAULTS = {"rank": 4, "alpha": 1.0}  # sd-scripts library/train_util.py, train_network.py
STEPS = 1600
NAMING = ("config_file", "dataset_config", "sample_prompts")  # flags that name a file which is imported with them
HUB_ID = "pretrained_model_name_or_path"  # OneTrainer and ai-toolkit have it for every model, also for one in --dit
MAIN_FLAGS = ("dit", HUB_ID)  # of the base model's main file
OPTIMIZER = ("optimizer_args", "lr_scheduler", "max_grad_norm")  # flags of a tier that belong to its optimizer
# Of a VRAM choice: they change the LoRA
LEARNED = (*OPTIMIZER, "optimizer_type", "network_args", "fp8_base", "quantize")
# Flags of a family that stay where the file has none: about the model, its memory, its precision and the file.
KEPT = ("model_type", "model_version", "task", "highvram", "no_half_vae", "save_model_as")
CODE = "It names Python code that would run. If you trust it, set it under “Extra trainer options”"
DEFAULT = "The trainer's default; the file has none"
OF_THE_MODEL = "The usual value of the base model; the file has none, and the trainer's default suits no LoRA"


def convert(found: Settings, tier: str = "") -> Settings:
    """The settings with the run that they describe; `found` stays as it is.

    Args:
        tier: the VRAM choice of this machine; "" where it has no GPU.

    Raises:
        RunError: it trains something that Hangproof cannot train.
    """
    out = copy.deepcopy(found)
    if {"model", "tier", "backend"} <= out.flags.keys():
        raise RunError("This is the run.toml of a run of Hangproof. Choose the train.sh and dataset.toml beside it")
    # It is no data set alone
    whole = bool(out.script or out.flags.keys() & {*MAIN_FLAGS, "network_module", "network_dim"})
    if whole:
        model, backend = _model(out)
        _lint(out, out.script or presets.trainer_of(model, backend)["script"])
        out.fields = {"model": model, "backend": backend, "tier": _tier(out, model, backend, tier)}
    given = set(out.flags)
    for flag in TABLES["classes"]["flags"]:
        name, packages = (out.flags.get(flag) or [""])[0], TABLES["classes"]["packages"]
        if "." in name and not name.startswith(tuple(f"{package}." for package in packages)):
            for one in (flag, flag.replace("_type", "_args")):
                out.take(one, "unsupported", CODE)
    if path := (out.flags.get("train_data_dir") or [""])[0]:
        out.add_folder(path)
    for flag in list(out.flags):
        _decide(out, flag)
    _beside_flags(out)
    if whole:
        _length(out, given)
        _extra(out, given)
    for flag in list(out.flags):
        out.take(flag, "unsupported", "A data set of Hangproof has no such setting")
    return out


# The base model -------------------------------------------------------------------------------------------------------


def _model(out: Settings) -> tuple[str, str]:
    """(base model, trainer): those whose script, files and flags the file has; decides the flags of its files."""
    able = [(key, backend) for key, model in presets.models().items() for backend in model["backends"]]
    key, backend = max(able, key=lambda one: _score(out, *one))
    if not _score(out, key, backend):
        raise RunError(
            f"{out.script or 'The file'} cannot be imported: Hangproof trains LoRAs, and has no base model for this script, "
            "or for its --task or --model_version"
        )
    model, needs = presets.models()[key], presets.trainer_of(key, backend)["needs"]
    for flag in needs if _main_flag(needs) == HUB_ID else (*needs, HUB_ID):
        given, main = (out.flags.get(flag) or [""])[0], flag in MAIN_FLAGS
        if not given:
            out.flags.pop(flag, None)
        elif main and _is_file_of(key, backend, given):
            out.take(flag, "field", f"Base model: {model['name']}")
        elif flag in model["files"] and _stem(model["files"][flag]) == _stem(given):
            out.take(flag, "same", f"{model['name']} has this file")
        elif not _exists(given):
            which = f"Base model: {model['name']}. " if main else ""
            out.take(flag, "changed", f"{which}This file is not on this machine; the one of {model['name']} is used")
    if left := [flag for flag in needs if flag in out.flags]:
        out.notes.append(f"Base model: {model['name']}, with your own files for {', '.join(left)}.")
    return key, backend


def _score(out: Settings, key: str, backend: str) -> int:
    """How well a base model and its trainer match the configuration; 0 where they cannot be meant."""
    model, trainer, flags = presets.models()[key], presets.trainer_of(key, backend), out.flags
    needs = trainer["needs"]
    if (out.script == "trainer") != (backend == "diffusers") or out.script not in ("", "trainer", trainer["script"]):
        return 0
    path = (flags.get(_main_flag(needs)) or flags.get(HUB_ID) or [""])[0]
    own, named = {**trainer["flags"], **model["flags"]}, _is_file_of(key, backend, path)
    kinds = {flag: [number(own[flag])] for flag in ("model_type", "model_version", "task") if flag in own}
    another = any(flags.get(flag, value) != value for flag, value in kinds.items()) and not _exists(path)
    if another or (model["generated"] and not named):
        return 0
    same = sum(2 if flags.get(flag) == value else -1 for flag, value in kinds.items())
    files = sum(1 if flag in flags else -1 for flag in needs) if any(flag in flags for flag in needs) else 0
    module = flags.get("network_module") == [trainer["network_module"]]
    return max(1, 20 + 10 * named + 3 * module + same + files)


def _stem(path: str) -> str:
    return file_name(path.rstrip("/\\")).rsplit(".", 1)[0].casefold()


def _main_flag(needs: Iterable[str]) -> str:
    """The flag of the main file, of those that a trainer needs for a base model."""
    return next((flag for flag in MAIN_FLAGS if flag in needs), HUB_ID)


def _is_file_of(key: str, backend: str, given: str) -> bool:
    """Whether a path or id of a configuration is the main file of a base model."""
    model, needs = presets.models()[key], presets.trainer_of(key, backend)["needs"]
    stems = (key, _stem(model["files"].get(_main_flag(needs), "")))
    return bool(given) and (given.casefold() in (model["repo"].casefold(), key) or _stem(given) in stems)


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().is_absolute() and Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _tier(out: Settings, model: str, backend: str, machine: str) -> str:
    """The VRAM choice: the one whose own flags the configuration has, else that of this machine, else the default."""
    able = {name: row["flags"] for name, row in presets.tiers_of(model, backend).items() if not row["problem"]}
    exact = [name for name, own in able.items() if own and all(_equal(out.flags.get(f), v) for f, v in own.items())]
    if exact:
        chosen = max(exact, key=lambda name: len(able[name]))
        why = "its optimizer and memory settings are those of the file"
    else:
        chosen = next((name for name in (machine, presets.defaults()["run"]["tier"]) if name in able), next(iter(able)))
        why = "the GPU of this machine" if chosen == machine else "the default; choose the memory of your GPU"
    out.rows.append(Row("VRAM", "", "field" if exact else "changed", f"{chosen}: {why}"))
    return chosen


def _equal(values: list[str] | None, ours: object) -> bool:
    """Whether a flag of the file has the value that Hangproof writes."""
    if values is None or ours is False:
        return values is None and ours is False
    if ours is True:
        return not values or values == ["true"] or values == ["1"]
    mine = [str(one) for one in ours] if isinstance(ours, list) else [number(ours)]
    return [_plain(one) for one in values] == [_plain(one) for one in mine]


def _plain(text: str) -> str:
    try:
        return repr(float(text))
    except ValueError:
        return text.casefold()


# Flags ----------------------------------------------------------------------------------------------------------------


def _lint(out: Settings, script: str) -> None:
    """Drop or change what is known to hang."""
    command = Command([Word(script, 0, 0)])
    flags = {flag: Flag(list(values)) for flag, values in out.flags.items() if flag != "config_file"}
    module, rules = "trainer" if script == "trainer" else "sd_scripts_patches", read_table("lint.toml")["rules"]
    for rule, changes in lint.check(Training(command, "sh", 0, module, flags, {}, opaque=False)).items():
        for change in changes:
            if change.kind == "Drop":
                out.take(change.flag, "dropped", rules[rule]["why"])
            elif change.kind == "Set" and change.flag in out.flags and rule != "no-state":
                text = f"Set to {' '.join(change.values) or 'on'}: {rules[rule]['why']}"
                out.row(change.flag, out.flags[change.flag], "dropped", text)
                out.flags[change.flag] = list(change.values)


def _set(out: Settings, key: str, value: object, row: Row) -> None:
    """Set a field of the run; of a value that the run refuses, the row says why."""
    try:
        make({"name": "my-lora", **out.fields, key: value})
    except RunError as error:
        row = replace(row, outcome="unsupported", text=error.faults[0].message)
    else:
        out.fields[key] = value
    out.rows.append(row)


def _beside_flags(out: Settings) -> None:
    """The fields that the file does not set by a flag: about its folders, prompts, processes and secrets."""
    repeats = {one.repeats for one in out.folders if one.path and one.repeats}
    if len(repeats) == 1:
        out.fields["repeats"] = repeats.pop()
    elif len(repeats) > 1:
        out.notes.append("The folders have different repeats; each keeps its own when you take its images over.")
    if triggers := [one.trigger for one in out.folders if one.trigger]:
        _set(out, "trigger", triggers[0], Row("class_tokens", shown(triggers[0]), "field", WORDS["trigger"]))
    if out.prompts:
        _set(out, "prompts", out.prompts, Row("sample_prompts", shown(out.prompts[0]), "field", WORDS["prompts"]))
    if out.gpus > 1:
        _set(out, "gpus", out.gpus, Row("num_processes", str(out.gpus), "field", WORDS["gpus"]))
    values = dict(out.secrets)
    for flag, variable in env_file.FLAGS.items():
        if value := (out.flags.get(flag) or [""])[0]:
            values[variable] = value
            out.take(flag, "changed", SECRET)
    out.rows += [Row(name, "…", "changed", SECRET) for name, value in out.secrets.items() if values[name] == value]
    if values:
        out.fields["environment"] = values


def _decide(out: Settings, flag: str) -> None:
    """What becomes of a flag, whatever trainer it is for: a field, or nothing; options of the trainer are left."""
    values, key = out.flags[flag], FIELDS.get(flag, "")
    unnamed = key == "name" and not (values and values[0].strip())
    if unnamed or (flag == "sample_prompts" and out.prompts):
        del out.flags[flag]
    elif key == "resolution":
        _resolution(out)
    elif key == "control_dir" and (model := presets.models().get(out.fields.get("model", ""))) and not model["control"]:
        out.take(
            flag, "unsupported", f"{model['name']} does not learn from pairs of images; choose a base model that does"
        )
    elif key == "name":
        _take(out, flag, key, values[0].strip()[:200])
    elif key and len(values) != 1:
        out.take(flag, "unsupported", "Not one value")
    elif key == "alpha" and _plain(values[0]) == "0.0":  # 0 means the rank (networks/lora.py)
        _take(out, flag, key, (out.flags.get("network_dim") or [out.fields.get("rank", 4)])[0])
    elif key:
        _take(out, flag, key, re.sub(r"^(\d+)\.0$", r"\1", values[0]))
    elif flag in NAMING and flag not in out.included:
        out.take(flag, "unsupported", "What is in this file is not imported; add the file, too")
    elif flag in DECIDED:
        out.take(flag, *DECIDED[flag])
    elif flag == "caption_extension":
        out.take(flag, "same" if values == [".txt"] else "unsupported", "Captions are .txt files")


def _take(out: Settings, flag: str, key: str, value: object, outcome: str = "field", text: str = "") -> None:
    """Set a field by a flag."""
    out.take(flag, outcome, text or WORDS[key])
    _set(out, key, value, out.rows.pop())


def _length(out: Settings, given: set[str]) -> None:
    """What the file leaves to its trainer: rank, alpha and length are as there, so that the run trains as it did."""
    usual: dict[str, Any] = {key: v for key, v in TRAINER_DEFAULTS.items() if out.plain and FLAG_OF[key] not in given}
    if not given & {"max_train_steps", "max_train_epochs"}:
        usual["max_train_steps"] = str(STEPS)
    out.fields |= usual
    out.rows += [Row(WORDS[key], str(value), "same", DEFAULT) for key, value in usual.items()]
    basic = _basic(out)
    decided = {*given, *(["learning_rate"] if "unet_lr" in given else [])}
    for key in sorted({"learning_rate", "mixed_precision"} - decided):  # 2e-6 and float32, which are for full models
        out.rows.append(Row(WORDS[key], number(getattr(basic, key)), "changed", OF_THE_MODEL))
    if "epochs" in out.fields:
        if "max_train_steps" in out.fields:  # sd-scripts: max_train_epochs overrides max_train_steps
            out.notes.append("The file sets epochs and steps; the epochs decide, as in kohya's trainers.")
        out.fields["max_train_steps"] = None


def _resolution(out: Settings) -> None:
    """One side of a square with the area of the resolution, a multiple of 32."""
    parts = " ".join(out.flags["resolution"]).replace(",", " ").replace("x", " ").split()
    try:
        sides = [float(part) for part in parts[:2]]
        whole = max(32, round(math.sqrt(sides[0] * sides[-1]) / 32) * 32)
    except (ValueError, IndexError, OverflowError):
        return out.take("resolution", "unsupported", "Not a resolution; set it by hand")
    kept = {*sides} == {whole}
    text = "" if kept else f"Resolution {whole}: a multiple of 32 with about the same area"
    return _take(out, "resolution", "resolution", whole, "field" if kept else "changed", text)


def _basic(out: Settings) -> RunSpec:
    """A run with the base model, the trainer and the VRAM choice of the import."""
    return make({"name": "my-lora", **{key: out.fields[key] for key in ("model", "backend", "tier")}})


def _extra(out: Settings, given: set[str]) -> None:
    """The flags that are left: those that Hangproof writes anyway, and those that become extra options."""
    basic = _basic(out)
    ours = ours_of(basic, outputs_dir() / basic.slug)
    known = known_flags(basic.backend, presets.models()[basic.model]["family"])
    extra = out.fields["extra"] = {}
    tier, optimizer = tier_flags(basic), out.flags.get("optimizer_type")
    for flag in list(out.flags):
        values, entry = out.flags[flag], known.get(flag)
        usual = entry.get("default") if entry and values and flag not in ours else None
        if flag in ours and _equal(values, ours[flag]):
            out.take(flag, "same", "Hangproof sets it")
        elif known and entry is None:
            out.take(flag, "unsupported", f"{basic.backend} has no such option")
        elif usual is not None and _equal(values, usual):
            out.take(flag, "same", "The trainer's default")
        elif flag in read_table("lint.toml")["path_flags"] and values and not _exists(values[0]):
            out.take(flag, "unsupported", "This file is not on this machine")
        else:
            several = len(values) > 1 or (entry and entry["nargs"])
            value = list(values) if several else flag_value(values[0], entry) if values else True
            wrong = _refused(out, flag, value, bool(known))
            if not wrong:
                extra[flag] = value
            out.take(flag, "unsupported" if wrong else "flag", wrong or "Extra trainer options")
    given |= {row.name.removeprefix("--") for row in out.rows}
    if "optimizer_type" in extra or (optimizer and _equal(optimizer, ours.get("optimizer_type"))):
        extra |= {flag: False for flag in OPTIMIZER if flag in tier and flag not in given}
    for flag, value in tier.items():
        if flag.startswith(LEARNED) and flag not in (*given, *extra):
            text = shown(" ".join(value) if isinstance(value, list) else number(value))
            out.rows.append(Row(f"--{flag}", text, "changed", "Set by the VRAM choice; the file has none"))
    for flag in presets.trainer_of(basic.model, basic.backend)["flags"] if out.kohya else ():
        usual = known.get(flag, {}).get("default")
        if flag == "network_train_unet_only" and flag not in given:
            text = "Not in the file, which trains text encoders, too; Hangproof does not"
            out.rows.append(Row(f"--{flag}", "on", "changed", text))
        elif flag not in (*KEPT, *given) and not _equal([number(usual)], ours[flag]):
            extra[flag] = False
            out.rows.append(Row(f"--{flag}", "" if usual is None else shown(usual), "same", DEFAULT))
    if not known:
        label, several = CHECKOUTS[basic.backend].name, len(presets.backends_of(basic.model)) > 1
        how = f"before you press Start, {INSTALL[basic.backend]}{', or choose another trainer' * several}"
        out.notes.append(f"{label} is not on this machine yet, so its options are not checked: {how}.")


def _refused(out: Settings, flag: str, value: object, known: bool) -> str:
    """Why the run, or its trainer where it is known, refuses an extra option; "" where it does not."""
    try:
        spec = make({"name": "my-lora", **out.fields, "extra": {**out.fields["extra"], flag: value}})
        faults = flag_faults(spec) if known else []
    except RunError as error:
        faults = list(error.faults)
    said = (one.message.partition(": ") for one in faults if one.field == "extra")
    return next((reason for name, _, reason in said if name == flag), "")
