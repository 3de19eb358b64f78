"""A job of ai-toolkit (YAML or JSON) as flags of kohya's trainers.

The names are those of ostris/ai-toolkit, config/examples/train_lora_flux_24gb.yaml. Only `safe_load` reads it, and only
plain values at known places are used: a file with references to itself costs nothing.
"""

from collections.abc import Mapping
from typing import Any

from runs.files import RunError
from runs.foreign_settings import OFF, TABLES, Settings, add_value, shown

NAMES = TABLES["ai_toolkit"]
USED = (*NAMES["flags"], "model.arch", "model.is_flux", "model.is_xl", "sample.prompts")  # read below
OTHER = "Hangproof has no such setting, or sets it by the base model"


def read_yaml(out: Settings, label: str, text: str) -> None:
    """Add what a YAML file sets. RunError: it is damaged, or is no job of ai-toolkit."""
    import yaml

    try:
        table = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        raise RunError(f"{label}: not valid YAML ({shown(error)}); choose the file again") from error
    if not isinstance(table, dict) or not isinstance(table.get("config"), dict):
        raise RunError(f"{label}: no job of ai-toolkit; it has a table “config” with a list “process”")
    read_job(out, label, table)


def read_job(out: Settings, label: str, table: Mapping[str, Any]) -> None:
    """Add what a job sets. RunError: it has no process."""
    config = table["config"]
    processes = config.get("process")
    first = processes[0] if isinstance(processes, list) and processes else None
    if not isinstance(first, dict):
        raise RunError(f"{label}: no job of ai-toolkit; “config” has no list “process”")
    out.kind = "a job of ai-toolkit"
    add_value(out, "output_name", config.get("name"), "name")
    parts = {name: part for name, part in first.items() if isinstance(name, str) and isinstance(part, dict)}
    for place, flag in NAMES["flags"].items():
        name, _, key = place.partition(".")
        if key in parts.get(name, {}) and flag not in out.flags:
            value = parts[name][key]
            add_value(out, flag, NAMES["precisions"].get(str(value)) if flag == "mixed_precision" else value, place)
    trigger = first.get("trigger_word")
    _model(out, parts.get("model", {}))
    _prompts(out, parts.get("sample", {}).get("prompts"))
    datasets = first.get("datasets")
    for one in [d for d in datasets if isinstance(d, dict)][:100] if isinstance(datasets, list) else []:
        path, repeats = one.get("folder_path"), one.get("num_repeats")
        if isinstance(path, str) and path:
            out.add_folder(path, repeats, trigger)
        sides = one.get("resolution")
        sides = sides if isinstance(sides, list) else [sides]
        if sides and isinstance(sides[-1], int) and "resolution" not in out.flags:
            add_value(out, "resolution", max(s for s in sides if isinstance(s, int)), "datasets.resolution")
            if len(sides) > 1:
                out.notes.append("The data set is trained at several resolutions; Hangproof trains at the largest one.")
    for name, part in parts.items():
        for key, value in part.items():
            place = f"{name}.{key}"
            taken = place in USED or value in OFF or (name, value) == ("network", "lora")
            if not taken and len(out.rows) < 300:
                text = value if isinstance(value, str | int | float) else "…"
                out.refuse(place, text, NAMES["not_taken"].get(place, OTHER))
    if isinstance(trigger, str) and trigger.strip() and not out.folders:
        out.add_folder("", None, trigger)


def _model(out: Settings, model: Mapping[str, Any]) -> None:
    arch = model.get("arch")
    scripts = NAMES["architectures"]
    known = arch if isinstance(arch, str) else next((key for key in scripts if model.get(f"is_{key}")), None)
    out.script = scripts.get(known.partition(":")[0].lower(), "") if known is not None else "train_network.py"
    if known and not out.script:
        raise RunError(f"model.arch: Hangproof has no base model of the kind {shown(known)}")


def _prompts(out: Settings, given: object) -> None:
    texts = [one.get("prompt") if isinstance(one, dict) else one for one in given] if isinstance(given, list) else []
    out.prompts = [" ".join(text.split())[:1000] for text in texts if isinstance(text, str) and text.strip()][:100]
