"""The fields of a RunSpec as the form, the import and the documentation read them: groups, labels, kinds, help texts.

Everything is said once, where RunSpec declares the field (runs/spec.py).
"""

from dataclasses import dataclass
from typing import Any, get_origin

import presets
from runs.spec import RunSpec, about, may_be_none


@dataclass(frozen=True)
class Field:
    """One field of the form. `key`: its name in RunSpec; `kind`: integer, text, lines or choice; `info`: help text."""

    key: str
    label: str
    kind: str
    info: str = ""
    choices: tuple[Any, ...] = ()


def _group(name: str) -> tuple[Field, ...]:
    found = []
    for key, field in RunSpec.model_fields.items():
        said, kinds = about(key), {int: "integer", list: "lines"}
        if said.get("group") == name:
            kind = kinds.get(get_origin(field.annotation) or field.annotation, "text")
            kind = "choice" if said["choices"] else kind
            found.append(Field(key, field.title or "", kind, field.description or "", said["choices"]))
    return tuple(found)


(CONTROL,) = _group("control")
LENGTH, SAMPLES, MORE, MACHINES = map(_group, ("length", "samples", "more", "machines"))
SUBJECTS = presets.read_table("subjects.toml")["subject"]
SUBJECT = Field(
    "subject",
    "What do you train?",
    "choice",
    "Sets the rank and the number of steps, until you change them",
    tuple((one["name"], one["key"]) for one in SUBJECTS),
)
FLAGS = Field(
    "flags", "Extra trainer options, one per line", "lines", "Use the trainer's names, e.g. noise_offset=0.05"
)
TYPED = (CONTROL, *LENGTH, *SAMPLES, *MORE, *MACHINES)
HEAD = {field.key: field for field in _group("head")}
KEYS = (*HEAD, *(field.key for field in (SUBJECT, *TYPED, FLAGS)))
LABELS = {field.key: field.label for field in (*HEAD.values(), SUBJECT, *TYPED)}
LABELS |= {"prompts": "Sample prompts", "flags": "Extra trainer options", "images": "Images", "script": "The script"}


# Fields that may be empty, and the value of the spec that an empty one gives.
_USUAL = {key: None if may_be_none(key) else field.default for key, field in RunSpec.model_fields.items()}
EMPTY: dict[str, Any] = {field.key: _USUAL[field.key] for field in TYPED if _USUAL[field.key] in (None, "", 0.0)}
EMPTY["prompts"] = ""


def reference() -> str:
    """All fields as a table of Markdown: `python -m runs fields`, and docs/settings.md."""
    rows = ["| Setting | What it is | Default | Flag of the trainers |", "|---|---|---|---|"]
    for field in (*HEAD.values(), *TYPED):
        default, flag = RunSpec.model_fields[field.key].default, about(field.key)["flag"]
        cells = (field.key, "" if default in ("", None, []) or field.key == "name" else default, flag)
        key, usual, named = (f"`{cell}`" if cell != "" else "" for cell in cells)
        rows.append(f"| {key} | {': '.join(filter(None, (field.label, field.info)))} | {usual} | {named} |")
    return "\n".join(rows) + "\n"
