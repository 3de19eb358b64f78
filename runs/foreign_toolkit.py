"""A job of ai-toolkit (YAML or JSON) as flags of kohya's trainers.

The names are those of ostris/ai-toolkit, config/examples/train_lora_flux_24gb.yaml. Only plain values at known places are
used: a file with references to itself costs nothing.
"""

from collections.abc import Mapping
from typing import Any

from runs.files import RunError
from runs.foreign_settings import OFF, TABLES, Settings, shown, tables

NAMES = TABLES["ai_toolkit"]
USED = (*NAMES["flags"], "model.arch", "model.is_flux", "model.is_xl", "sample.prompts")  # read below
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
    for place, flag in NAMES["flags"].items():
        name, _, key = place.partition(".")
        if key in parts.get(name, {}) and flag not in out.flags:
            value = parts[name][key]
            out.add(flag, NAMES["precisions"].get(str(value)) if flag == "mixed_precision" else value, place)
    out.script = _script(parts.get("model", {}))
    given = parts.get("sample", {}).get("prompts")
    texts = [one.get("prompt") if isinstance(one, dict) else one for one in given] if isinstance(given, list) else []
    out.prompts = [" ".join(text.split())[:1000] for text in texts if isinstance(text, str) and text.strip()][:100]
    _folders(out, tables(first.get("datasets"))[:100], first.get("trigger_word"))
    for name, part in parts.items():
        for key, value in part.items():
            place = f"{name}.{key}"
            taken = place in USED or value in OFF or (name, value) == ("network", "lora")
            if not taken and len(out.rows) < 300:
                text = value if isinstance(value, str | int | float) else "…"
                out.refuse(place, text, NAMES["not_taken"].get(place, OTHER))


def _folders(out: Settings, datasets: list[dict[str, Any]], trigger: object) -> None:
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


def _script(model: Mapping[str, Any]) -> str:
    """The training script of a base model. RunError: it is of a kind that Hangproof does not train."""
    scripts, arch = NAMES["architectures"], model.get("arch")
    known = arch if isinstance(arch, str) else next((key for key in scripts if model.get(f"is_{key}")), None)
    if known is None:
        return "train_network.py"
    script = str(scripts.get(known.partition(":")[0].lower(), ""))
    if known and not script:
        raise RunError(f"model.arch: Hangproof has no base model of the kind {shown(known)}")
    return script
