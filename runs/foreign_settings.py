"""What a configuration of another trainer sets, by the flags of kohya's trainers; every reader of a format adds to it.

The names of each trainer, and what becomes of them, are tables: presets/foreign.toml.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from presets import read_table
from runs import env_file
from runs.files import RunError

TABLES = read_table("foreign.toml")
MAX_FLAGS = 2000
SHOWN = 160  # characters of a value in a message
OFF = (None, "", False)  # values that a file can hold for a setting that is off


@dataclass(frozen=True)
class Row:
    """What becomes of one setting of the file.

    outcome: "field" (a field of the form), "flag" (an extra option), "same" (Hangproof sets it already), "run" (the
    run's folder determines it), "changed", "dropped" (known to hang), "unsupported". text: where it went, or why not.
    """

    name: str
    value: str
    outcome: str
    text: str

    def __post_init__(self) -> None:
        flag = re.split(r"[.\s]", self.name.removeprefix("--"))[-1]
        if self.value and (env_file.is_secret_flag(flag) or env_file.VALUE.search(self.value)):
            object.__setattr__(self, "value", "…")


@dataclass(frozen=True)
class ImageFolder:
    """A folder of images that a file names. repeats: None where the file has none for it."""

    path: str
    repeats: int | None = None
    trigger: str = ""


@dataclass
class Settings:
    """What the files set.

    kind: what they are, for a sentence. script: the training script, "" where no file names one. flags: by name, their
    values ([] for a switch); as a run, those that are not decided yet. labels: how the file writes a flag, where this
    differs. rows: one for each setting that is decided. As a run: fields of a RunSpec, `extra` included.
    """

    kind: str = ""
    script: str = ""
    flags: dict[str, list[str]] = field(default_factory=dict, repr=False)
    labels: dict[str, str] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    folders: list[ImageFolder] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)  # that a script sets, by variable
    notes: list[str] = field(default_factory=list)
    gpus: int = 1
    plain: bool = True  # False: a kind of LoRA that Hangproof does not train, so its rank says nothing
    fields: dict[str, Any] = field(default_factory=dict)

    def row(self, flag: str, values: list[str], outcome: str, text: str) -> None:
        """Say what became of a flag."""
        self.rows.append(Row(self.labels.get(flag, f"--{flag}"), shown(" ".join(values) or "on"), outcome, text))

    def take(self, flag: str, outcome: str, text: str) -> None:
        """Decide a flag: its row, and no more of it."""
        if (values := self.flags.pop(flag, None)) is not None:
            self.row(flag, values, outcome, text)

    def refuse(self, name: str, value: object, text: str) -> None:
        """Say why a setting is not taken over."""
        self.rows.append(Row(shown(name), shown(value), "unsupported", text))

    def add(self, flag: object, value: object, label: str = "") -> None:
        """Add a flag with a value of a file or a command; one that is off is left out. RunError: there are too many.

        Args:
            value: a list for several values or, where it is empty, for a switch. label: how the file writes the flag.
        """
        if value in OFF or not isinstance(flag, str):
            return None
        values = value if isinstance(value, list) else [] if value is True else [value]
        if not all(isinstance(one, str | int | float) for one in values):
            return self.refuse(label or flag, "…", "Not a plain value")
        if len(self.flags) >= MAX_FLAGS:
            raise RunError(f"The file has more than {MAX_FLAGS} settings, so it is no configuration")
        texts = [number(one) for one in values]
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", flag):
            return self.refuse(flag, " ".join(texts), "Not the name of an option")
        self.flags[flag] = texts
        if label and label != flag:
            self.labels[flag] = label
        return None

    def add_folder(self, path: str, repeats: object = None, trigger: object = None) -> None:
        """Add a folder of images. What is no plain number or text is left out."""
        whole = isinstance(repeats, int) and not isinstance(repeats, bool) and 1 <= repeats <= 10**6
        word = " ".join(trigger.split())[:200] if isinstance(trigger, str) else ""
        self.folders.append(ImageFolder(path[:4000], repeats if whole else None, word))  # type: ignore[arg-type]


def number(value: object) -> str:
    """A plain value as text; a whole number without a point."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and abs(value) < 1e15 and value == int(value):
        return str(int(value))
    return str(value)


def shown(value: object) -> str:
    """A value for a person: one line, not too long."""
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def lines_of(text: str) -> list[str]:
    """Sample prompts: the lines of a file without comments; at most 100."""
    lines = (line.strip() for line in text.splitlines())
    return [line[:1000] for line in lines if line and not line.startswith("#")][:100]


def tables(value: object) -> list[dict[str, Any]]:
    """The tables of a list of a file; at most 1000."""
    return [one for one in value if isinstance(one, dict)][:1000] if isinstance(value, list) else []
