"""A foreign configuration as a run of Hangproof: what each of its settings becomes, and why.

Nothing is taken over blindly: the base model is found by its file, the VRAM choice by the optimizer and the machine,
flags that are known to hang are dropped (presets/lint.toml), and what Hangproof sets anyway is not repeated. The result
is checked like any run. Every setting of the file ends in exactly one row.
"""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import presets
from presets import lint
from presets.syntax import Command, Word
from presets.tables import _table
from presets.training import Flag, Training, file_name
from runs import env_file
from runs.fields import LABELS
from runs.files import RunError
from runs.foreign_settings import TABLES, Row, Settings, number, shown
from runs.paths import CHECKOUTS, outputs_dir
from runs.spec import ALIASES, RESERVED_FLAGS

NOT_IMPORTED = (
    "model",
    "tier",
    "backend",
    "keep_states",
    "sample_steps",
    "store",
    "nodes",
    "price_per_hour",
    "spend_limit",
)
WORDS = {key: label for key, label in {**LABELS, "keep_tokens": "keep_tokens"}.items() if key not in NOT_IMPORTED}
NOT_HERE, BY_HANGPROOF = (
    {flag: reason for reason, flags in TABLES[name].items() for flag in flags} for name in ("not_here", "by_hangproof")
)
TRAINER_DEFAULTS = {"rank": 4, "alpha": 1.0}  # sd-scripts library/train_util.py, train_network.py
STEPS = 1600
SECRET = "A secret: kept apart, in a file that only you can read; the run has its name"
OWN_RUN = "The run's own folder is used"
SDPA = "Computed with PyTorch's own attention (--sdpa), which gives the same result"
OPTIMIZER = ("optimizer_args", "lr_scheduler", "max_grad_norm")  # flags of a tier that belong to its optimizer


def convert(found: Settings, tier: str = "") -> Settings:
    """The settings with the run that they describe; `found` stays as it is.

    Args:
        tier: the VRAM choice of this machine; "" where it has no GPU.

    Raises:
        RunError: it trains something that Hangproof cannot train.
    """
    out = copy.deepcopy(found)
    flags = out.flags
    if not out.script and not _says_a_model(flags):
        return _dataset_only(out)
    family, backend = _family(out.script, flags)
    model = _model(out, family, backend)
    _lint(out, out.script or presets.families()[family]["backends"][backend]["script"])
    out.fields = {"model": model, "backend": backend, "tier": _tier(out, model, backend, tier)}
    _fields(out)
    _secrets(out)
    _own_flags(out)
    _extra(out)
    return _checked(out)


def _says_a_model(flags: Mapping[str, list[str]]) -> bool:
    return any(flag in flags for flag in ("pretrained_model_name_or_path", "network_module", "network_dim", "dit"))


def _dataset_only(out: Settings) -> Settings:
    """A dataset.toml alone: the fields about the data set."""
    _fields(out)
    _own_flags(out)
    for flag in list(out.flags):
        out.take(flag, "unsupported", "A data set of Hangproof has no such setting")
    return out


# The base model ----------------------------------------------------------------------------------------------------------


def _family(script: str, flags: Mapping[str, list[str]]) -> tuple[str, str]:
    """(family, trainer) of a training script; of several the one whose files and flags the configuration has."""
    pairs, best = [], (-1, "", "")
    for name, family in presets.families().items():
        for backend, trainer in family["backends"].items():
            built_in = script == "trainer" and backend == "diffusers"
            if (backend != "diffusers" and script in ("", trainer["script"])) or built_in:
                pairs.append((name, backend, trainer))
    for name, backend, trainer in pairs:
        score = 3 * (flags.get("network_module") == [trainer["network_module"]]) + 1
        if any(flag in flags for flag in trainer["needs"]):
            score += sum(1 if flag in flags else -1 for flag in trainer["needs"])
        for key, model in presets.models().items():
            if model["family"] == name and backend in model["backends"]:
                matches = _matches(key, model, flags, trainer["needs"])
                own = {**trainer["flags"], **model["flags"]}
                named = sum(
                    flags.get(flag) == [number(value)]
                    for flag, value in own.items()
                    if flag in ("model_type", "model_version", "task")
                )
                score = max(score, score + 10 * matches) if matches else score
                score += 2 * (named > 0)
        if score > best[0] or not best[1]:
            best = (score, name, backend)
    if not best[1]:
        raise RunError(
            f"{script or 'The file'} cannot be imported: Hangproof trains LoRAs, and has no base model for this script"
        )
    return best[1], best[2]


def _stem(path: str) -> str:
    return file_name(path.rstrip("/\\")).rsplit(".", 1)[0].casefold()


def _main_flag(needs: list[str]) -> str:
    return "dit" if "dit" in needs else "pretrained_model_name_or_path"


def _matches(key: str, model: Mapping[str, Any], flags: Mapping[str, list[str]], needs: list[str]) -> bool:
    given = (flags.get(_main_flag(needs)) or [""])[0]
    if not given:
        return False
    names = {_stem(name) for flag, name in model["files"].items() if flag == _main_flag(needs)}
    return given.casefold() in (model["repo"].casefold(), key) or _stem(given) in names or _stem(given) == key


def _model(out: Settings, family: str, backend: str) -> str:
    """The base model, and what becomes of the flags that name its files."""
    flags = out.flags
    models = {
        key: model
        for key, model in presets.models().items()
        if model["family"] == family and backend in model["backends"]
    }
    if not any(not model["generated"] for model in models.values()):
        raise RunError(f"Hangproof has no base model of {family} for {backend}; add one to models.toml")
    needs = presets.families()[family]["backends"][backend]["needs"]
    chosen = next((key for key, model in models.items() if _matches(key, model, flags, needs)), None)
    key = chosen or next((key for key, model in models.items() if not model["generated"]), "")
    for flag in needs:
        given = (flags.get(flag) or [""])[0]
        if not given:
            flags.pop(flag, None)
            continue
        usual = models[key]["files"].get(flag, "")
        name = models[key]["name"]
        if flag == _main_flag(needs) and chosen:
            out.take(flag, "field", f"Base model: {name}")
        elif usual and _stem(usual) == _stem(given):
            out.take(flag, "same", f"{name} has this file")
        elif not _exists(given):
            which = f"Base model: {name}. " if flag == _main_flag(needs) else ""
            text = f"{which}This file is not on this machine; the one of {name} is used"
            out.take(flag, "changed", text)
    if flag_left := [flag for flag in needs if flag in flags]:
        out.notes.append(f"Base model: {models[key]['name']}, with your own files for {', '.join(flag_left)}.")
    return key


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().is_absolute() and Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _tier(out: Settings, model: str, backend: str, machine: str) -> str:
    """The VRAM choice: the one whose own flags the configuration has, else that of this machine, else the default."""
    able = {name: row["flags"] for name, row in presets.tiers_of(model, backend).items() if not row["problem"]}
    exact = [name for name, wanted in able.items() if wanted and _has_all(out.flags, wanted)]
    if exact:
        chosen = max(exact, key=lambda name: len(able[name]))
        why = "its optimizer and memory settings are those of the file"
    else:
        chosen = next((name for name in (machine, presets.defaults()["run"]["tier"]) if name in able), next(iter(able)))
        why = "the GPU of this machine" if chosen == machine else "the default; choose the memory of your GPU"
    out.rows.append(Row("VRAM", "", "field" if exact else "changed", f"{chosen}: {why}"))
    return chosen


def _has_all(flags: Mapping[str, list[str]], wanted: Mapping[str, Any]) -> bool:
    return all(_equal(flags.get(flag), value) for flag, value in wanted.items())


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
        found = float(text)
    except ValueError:
        return text.casefold()
    return repr(found)


# Flags -------------------------------------------------------------------------------------------------------------------


def _lint(out: Settings, script: str) -> None:
    """Drop or change what is known to hang."""
    command = Command([Word(script, 0, 0, shape=script)])
    flags = {flag: Flag(list(values)) for flag, values in out.flags.items() if flag != "config_file"}
    module, rules = "trainer" if script == "trainer" else "sd_scripts_patches", _table("lint.toml")["rules"]
    for rule, changes in lint.check(Training(command, "sh", 0, module, flags, {}, opaque=False)):
        for change in changes:
            if change.kind == "Drop":
                out.take(change.flag, "dropped", rules[rule]["why"])
            elif change.kind == "Set" and change.flag in out.flags and rule != "no-state":
                text = f"Set to {' '.join(change.values) or 'on'}: {rules[rule]['why']}"
                out.row(change.flag, out.flags[change.flag], "dropped", text)
                out.flags[change.flag] = list(change.values)


def _fields(out: Settings) -> None:
    """The flags that are fields of the form."""
    flags = out.flags
    from runs.spec import RunSpec

    name = flags.pop("output_name", None)
    if name and name[0].strip():
        out.fields["name"] = name[0].strip()[:200]
        out.row("output_name", name, "field", WORDS["name"])
    if "resolution" in flags:
        _resolution(out)
    if "control_directory" in flags:
        out.fields["control_dir"] = flags["control_directory"][0]
        out.take("control_directory", "field", WORDS["control_dir"])
    for flag in list(flags):
        key = ALIASES.get(flag, flag)
        if key not in WORDS or key not in RunSpec.model_fields or key in ("resolution", "prompts"):
            continue
        values = flags[flag]
        if len(values) != 1:
            out.take(flag, "unsupported", "Not one value")
            continue
        value: Any = values[0]
        if key == "alpha" and _plain(value) == "0.0":
            value = (flags.get("network_dim") or [out.fields.get("rank", 4)])[0]  # 0 means the rank (networks/lora.py)
        if key in ("workers", "seed", "rank", "batch_size", "repeats", "epochs") and _plain(value).endswith(".0"):
            value = number(float(value))
        out.fields[key] = value
        out.take(flag, "field", WORDS[key])
    folders = [one for one in out.folders if one.path]
    repeats = {one.repeats for one in folders if one.repeats}
    if len(repeats) == 1:
        out.fields["repeats"] = repeats.pop()
    elif len(repeats) > 1:
        out.notes.append("The folders have different repeats; each keeps its own when you take its images over.")
    if triggers := [one.trigger for one in out.folders if one.trigger]:
        out.fields["trigger"] = triggers[0]
        out.rows.append(Row("class_tokens", shown(triggers[0]), "field", WORDS["trigger"]))
    if out.prompts:
        out.fields["prompts"] = out.prompts
        out.rows.append(Row("sample_prompts", shown(out.prompts[0]), "field", WORDS["prompts"]))
        flags.pop("sample_prompts", None)
    if out.gpus > 1:
        out.fields["gpus"] = out.gpus
        out.rows.append(Row("num_processes", str(out.gpus), "field", WORDS["gpus"]))
    if "model" in out.fields:
        _length(out, TRAINER_DEFAULTS if out.plain else {})


def _length(out: Settings, usual: Mapping[str, Any]) -> None:
    """Rank, alpha and length of the trainer where the file has none: so that the run trains as it did there."""
    for key, value in usual.items():
        if key not in out.fields:
            out.fields[key] = value
            out.rows.append(Row(WORDS[key], str(value), "same", "The trainer's default; the file has none"))
    if "max_train_steps" not in out.fields and "epochs" not in out.fields:
        out.fields["max_train_steps"] = str(STEPS)
        out.rows.append(Row(WORDS["max_train_steps"], str(STEPS), "same", "The trainer's default; the file has none"))
    elif "epochs" in out.fields and "max_train_steps" in out.fields:
        # sd-scripts: max_train_epochs overrides max_train_steps
        out.fields["max_train_steps"] = None
        out.notes.append("The file sets epochs and steps; the epochs decide, as in kohya's trainers.")
    elif "epochs" in out.fields:
        out.fields["max_train_steps"] = None


def _resolution(out: Settings) -> None:
    """One side of a square with the area of the resolution, a multiple of 32."""
    flags = out.flags
    parts = " ".join(flags["resolution"]).replace(",", " ").replace("x", " ").split()
    try:
        sides = [float(part) for part in parts[:2]]
        side = math.sqrt(sides[0] * sides[-1])
        whole = max(32, round(side / 32) * 32)
    except (ValueError, IndexError, OverflowError):
        return out.take("resolution", "unsupported", "Not a resolution; set it by hand")
    out.fields["resolution"] = whole
    square = len(set(sides)) == 1 and whole == sides[0]
    text = WORDS["resolution"] if square else f"Resolution {whole}: a multiple of 32 with about the same area"
    return out.take("resolution", "field" if square else "changed", text)


def _secrets(out: Settings) -> None:
    """The secrets, which a run keeps apart from its other settings."""
    flags, set_in_script = out.flags, dict(out.secrets)
    values = dict(set_in_script)
    for flag, variable in env_file.FLAGS.items():
        if value := (flags.get(flag) or [""])[0]:
            values[variable] = value
            set_in_script.pop(variable, None)
            out.take(flag, "changed", SECRET)
    out.rows += [Row(name, "…", "changed", SECRET) for name in set_in_script]
    if values:
        out.fields["environment"] = values


def _own_flags(out: Settings) -> None:
    """Flags that Hangproof sets itself, or that it cannot take over."""
    flags = out.flags
    for flag in list(flags):
        if flag in NOT_HERE:
            out.take(flag, "unsupported", NOT_HERE[flag])
        elif BY_HANGPROOF.get(flag):
            out.take(flag, "run", BY_HANGPROOF[flag])
        elif flag == "caption_extension":
            right = flags[flag] == [".txt"]
            out.take(flag, "same" if right else "unsupported", "Captions are .txt files")
        elif flag in RESERVED_FLAGS:
            out.take(flag, "run", OWN_RUN)
        elif flag in ("xformers", "mem_eff_attn"):
            out.take(flag, "changed", SDPA)


def _extra(out: Settings) -> None:
    """The other flags: those that Hangproof writes anyway, and those that become extra options."""
    flags = out.flags
    from runs.command import flags as ours_of
    from runs.flags import known_flags
    from runs.spec import make

    basic = make({"name": "my-lora", **{key: out.fields[key] for key in ("model", "backend", "tier")}})
    ours = ours_of(basic, outputs_dir() / basic.slug)
    known = known_flags(basic.backend, presets.models()[basic.model]["family"])
    tier = presets.tiers_of(basic.model, basic.backend)[basic.tier]["flags"]
    extra: dict[str, Any] = {}
    given = set(flags) | {row.name.removeprefix("--") for row in out.rows}
    for flag in list(flags):
        values, entry = flags[flag], known.get(flag)
        if flag in ours and _equal(values, ours[flag]):
            out.take(flag, "same", "Hangproof sets it")
        elif known and entry is None:
            out.take(flag, "unsupported", f"{basic.backend} has no such option")
        elif (
            entry
            and values
            and entry.get("default") is not None
            and _equal(values, entry["default"])
            and flag not in ours
        ):
            out.take(flag, "same", "The trainer's default")
        elif flag in _table("lint.toml")["path_flags"] and values and not _exists(values[0]):
            out.take(flag, "unsupported", "This file is not on this machine")
        else:
            extra[flag] = _typed(values, entry)
            out.take(flag, "flag", "Extra trainer options")
    if "optimizer_type" in extra:
        off = [flag for flag in OPTIMIZER if flag in tier and flag not in given]
        extra |= dict.fromkeys(off, False)
    out.fields["extra"] = extra
    written = [flag for flag, value in ours.items() if value is not False and flag not in extra]
    fixed = {*RESERVED_FLAGS, *BY_HANGPROOF, *ALIASES, *WORDS, "persistent_data_loader_workers"}
    needs = presets.trainer_of(basic.model, basic.backend)["needs"]
    out.added = [
        f"--{flag}" + ("" if ours[flag] is True else f" {_words(ours[flag])}")
        for flag in written
        if flag not in given and flag not in fixed and flag not in needs and flag not in out.labels
    ]


def _words(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else number(value)


def _typed(values: list[str], entry: Mapping[str, Any] | None) -> Any:
    """The value of an extra option, with the type that the trainer's parser has for it."""
    if not values:
        return True
    if len(values) > 1 or (entry and entry["nargs"]):
        return list(values)
    text = values[0]
    if entry and entry["type"] == "bool":
        return text.casefold() not in ("false", "0", "no")
    kind = {"int": int, "float": float}.get(entry["type"] if entry else "", str)
    try:
        return kind(text)
    except ValueError:
        return text


def _checked(out: Settings) -> Settings:
    """The import without the values that a run refuses: each becomes a row that says why."""
    from runs.flags import flag_faults, known_flags
    from runs.spec import make

    name = out.fields.pop("name", "")
    for _ in range(len(out.fields) + len(out.fields["extra"]) + 1):
        try:
            spec = make({"name": "my-lora", **out.fields})
            break
        except RunError as error:
            for fault in error.faults:
                _refuse(out, fault.field, fault.message)
    else:
        raise RunError("The settings of the file contradict each other; correct the file")
    if known_flags(spec.backend, presets.models()[spec.model]["family"]):
        for fault in flag_faults(spec):
            flag, _, reason = fault.message.partition(": ")
            if fault.field == "extra" and flag in out.fields["extra"]:
                _refuse(out, flag, reason)
    elif out.fields["extra"]:
        label = CHECKOUTS[spec.backend].name
        out.notes.append(f"{label} is not installed, so its extra options cannot be checked yet.")
    if name:
        try:
            out.fields["name"] = make({"name": name}).name
        except RunError as error:
            _refuse(out, "name", error.faults[0].message)
    return out


def _refuse(out: Settings, key: str, message: str) -> None:
    """Take a field or an extra option back."""
    flag = message.partition(":")[0] if key == "extra" else key
    removed = (
        out.fields["extra"].pop(flag, None)
        if key == "extra" or key in out.fields["extra"]
        else out.fields.pop(key, None)
    )
    if removed is None and key == "extra":
        out.fields["extra"] = {}
    label = WORDS.get(key, key)
    rows = [
        row
        for row in out.rows
        if row.outcome in ("field", "flag") and (row.text == label or row.name in (f"--{flag}", flag))
    ]
    name = rows[0].name if rows else f"--{flag}"
    out.rows = [row for row in out.rows if row not in rows]
    out.rows.append(Row(name, shown(removed), "unsupported", message))
