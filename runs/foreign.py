"""Reads the configurations of other trainers: what they set, by the flags of kohya's trainers, which all of them share.

FluxGym's train.sh and dataset.toml, a command, script or `--config_file` of sd-scripts, a command of musubi-tuner, a
JSON of the kohya_ss GUI and a job of ai-toolkit (runs/foreign_programs.py). Everything here is text from elsewhere: it
is parsed and never run, its size is limited, and whatever is wrong with it is a RunError. runs/foreign_spec.py turns
the result into a run.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tomllib

from presets import PresetError, read_table
from presets.training import Training, file_name, trainings
from runs import env_file
from runs.files import RunError
from runs.foreign_programs import read_gui, read_job
from runs.foreign_settings import Settings, lines_of, shown, tables

MAX_BYTES = 1_000_000  # of one file
MAX_SCRIPT = 64_000  # of a script or YAML, which take longer to read; FluxGym's have 3 kB
MAX_FILES = 10
DATA_SET = re.compile(r"^[ \t]*\[\[?(datasets|general)", re.MULTILINE)
READ = (
    "a train.sh and dataset.toml of FluxGym, a JSON of kohya_ss, a command, script or config TOML of sd-scripts, a command of "
    "musubi-tuner, or a YAML of ai-toolkit"
)


def read(files: Sequence[tuple[str, str]]) -> Settings:
    """What some files set together, such as a train.sh with its dataset.toml.

    Args:
        files: (name, text); a name is "" for pasted text.

    Raises:
        RunError: a file is too large, cannot be read, or is no configuration that Hangproof knows.
    """
    files = [(name.strip()[:200], text) for name, text in files if text.strip()]
    if not files:
        raise RunError(f"There is nothing to import. Paste or choose {READ}")
    if len(files) > MAX_FILES:
        raise RunError(f"{len(files)} files are too many; choose at most {MAX_FILES}")
    for name, text in files:
        if len(text) > MAX_BYTES:
            raise RunError(f"{name or 'The text'}: larger than {MAX_BYTES // 1000} kB, so it is no configuration")
        if "\0" in text:
            raise RunError(f"{name or 'The text'}: contains a NUL character, so it is no text; choose another file")
    out, texts = Settings(), []
    # Scripts before data sets: the script says what the kind is.
    for name, text in sorted(files, key=lambda one: DATA_SET.search(one[1]) is not None):
        try:
            if not _read_one(out, name, text.lstrip("\ufeff")):
                texts.append((name, text))
        except RecursionError as error:
            raise RunError(f"{name or 'The text'}: nested too deeply, so it is no configuration") from error
    wanted = file_name((out.flags.get("sample_prompts") or [""])[0])
    for name, text in texts:
        if wanted and file_name(name) == wanted:
            out.prompts = lines_of(text)
        else:
            raise RunError(f"{name or 'The text'}: this is not {READ}. Check that it is complete")
    if not out.kind:
        raise RunError(f"The file has no settings of a training. Choose {READ}")
    return out


def _read_one(out: Settings, name: str, text: str) -> bool:
    """Add what one file sets; False for a text of an unknown kind."""
    label, short = name or "The text", len(text) <= MAX_SCRIPT
    if short and not text.lstrip().startswith("{") and (found := _commands(name, text)):
        read_command(out, found[0])
        out.secrets |= env_file.of_script(text)[1]
        if len(found) > 1:
            out.notes.append(f"{label} has {len(found)} training commands; the first is imported.")
    elif (table := _table_of(label, text)) is not None:
        _read_table(out, label, *table)
    elif not short:
        raise RunError(f"{label}: larger than {MAX_SCRIPT // 1000} kB, so it is no script of a training")
    elif re.search(r"(^|\s)--[A-Za-z]", text) and (found := _commands("", f"train_network.py {text.strip()}")):
        read_command(out, found[0])
        out.script = ""
    else:
        return False
    return True


def _commands(name: str, text: str) -> list[Training]:
    """The training commands of a script or a command line. The dialect is that of its name, else of its line ends."""
    name = file_name(name)
    if re.search(r"\^[ \t]*\r?\n", text) and not re.search(r"\\\r?\n", text):
        name = "train.bat"
    elif re.search(r"`\r?\n", text):
        name = "train.ps1"
    text = text.replace("\r\n", "\n") if name != "train.bat" else text
    try:
        return trainings(text, name or "train.sh", plain=True)
    except (PresetError, ValueError, IndexError) as error:
        raise RunError(f"{name or 'The text'}: the command cannot be read ({error}); check its quotes") from error


def read_command(out: Settings, t: Training) -> None:
    """Add what a training command sets."""
    word = t.command.words[t.script]
    out.script = "trainer" if t.module == "trainer" else file_name(word.shape)
    guarded = out.script in read_table("lint.toml")["guarded_scripts"]
    out.kind = f"a command of {'musubi-tuner' if guarded else 'sd-scripts'}"
    if out.script == "trainer":
        out.kind = "a script of Hangproof"
    elif "sd-scripts/flux_train_network.py" in word.shape.replace("\\", "/") and not t.module:
        out.kind = "a script of FluxGym"
    count = t.launch.get("num_processes") or ""
    out.gpus = int(count) if count.isdigit() and 1 <= int(count) <= 1024 else 1
    for flag, known in t.flags.items():
        if known.values and None in known.values:
            out.refuse(f"--{flag}", "…", "Its value is known only when the script runs; set it by hand")
        else:
            out.add(flag, [value or "" for value in known.values])
    if t.command.opaque:
        at = next((one.start for one in t.command.words if one.value is None), t.command.end)
        line = t.source.count("\n", 0, at) + 1
        out.notes.append(f"Not understood: line {line}. What it adds to the command is known only when it runs.")
    config = t.text("config_file")
    if config and t.config is None:
        out.notes.append(f"The settings in {shown(config)} are not included; add that file, too.")


def _table_of(label: str, text: str) -> tuple[str, Any] | None:
    """("JSON", "YAML" or "TOML", what it holds); None where the text is none. RunError: it looks like one, and is damaged."""
    import yaml

    kind, parse = "TOML", tomllib.loads
    if text.lstrip().startswith("{"):
        kind, parse = "JSON", json.loads
    elif len(text) <= MAX_SCRIPT and re.search(r"^(job|config)[ \t]*:", text, re.MULTILINE):
        kind, parse = "YAML", yaml.safe_load
    try:
        return kind, parse(text)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        if kind == "TOML" and not label.lower().endswith(".toml") and not re.match(r"\s*(\[|[A-Za-z_]+ *= )", text):
            return None
        raise RunError(f"{label}: not valid {kind} ({shown(error)}); correct it, or choose the file again") from error


def _read_table(out: Settings, label: str, kind: str, table: Any) -> None:
    """Add what a file of tables sets: ai-toolkit's have YAML or JSON, kohya_ss's JSON, those of kohya's trainers TOML."""
    if not isinstance(table, dict):
        raise RunError(f"{label}: a configuration is a table of names and values")
    if kind == "YAML" or (kind == "JSON" and isinstance(table.get("config"), dict)):
        return read_job(out, label, table)
    if kind == "JSON":
        return read_gui(out, label, table)
    if "datasets" in table or "general" in table:
        return read_dataset(out, table)
    out.kind = out.kind or "a config file of sd-scripts"  # flags, some of them in tables whose names mean nothing
    for key, value in table.items():
        for flag, setting in value.items() if isinstance(value, dict) else [(key, value)]:
            out.add(flag, setting)
    return None


# Data sets ---------------------------------------------------------------------------------------------------------------

# Of a data set or a subset, by the names of sd-scripts and of musubi-tuner: the flag that means the same.
DATASET_FLAGS = {"batch_size": "train_batch_size", "num_repeats": "dataset_repeats"}
FOLDER_KEYS = ("image_dir", "image_directory")
NO_FLAGS = ("subsets", "class_tokens", "cache_directory", "is_reg", "metadata_file", *FOLDER_KEYS)


def read_dataset(out: Settings, table: Mapping[str, Any]) -> None:
    """Add what a dataset.toml of sd-scripts or musubi-tuner sets."""
    out.kind = out.kind or "a dataset.toml"
    given, datasets = table.get("general"), tables(table.get("datasets"))
    general: dict[str, Any] = given if isinstance(given, dict) else {}
    if len({str(one.get("resolution"))[:80] for one in datasets}) > 1:
        out.notes.append("The data set is trained at several resolutions; Hangproof trains at the first one.")
    first = datasets[0] if datasets else {}
    subsets = [subset for one in datasets for subset in (tables(one.get("subsets")) or [one])]
    for source in (general, first, subsets[0] if subsets else {}):
        for key, value in source.items():
            if key not in NO_FLAGS:
                out.add(DATASET_FLAGS.get(key, key), value, key)
    seen = set()
    for subset in subsets:
        path = next((subset[key] for key in FOLDER_KEYS if isinstance(subset.get(key), str)), "")
        if not path or path in seen:
            if isinstance(subset.get("video_directory"), str):
                out.refuse("video_directory", subset["video_directory"], "Hangproof trains on images")
            continue
        seen.add(path)
        if subset.get("is_reg") is True:
            out.refuse("is_reg", path, "Regularization images are not supported; leave them out")
            continue
        repeats = subset.get("num_repeats", first.get("num_repeats", general.get("num_repeats")))
        out.add_folder(path, repeats, subset.get("class_tokens"))
