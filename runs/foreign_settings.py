"""What the files of another trainer set, by the flags of kohya's trainers, which all of them share.

The readers (runs/foreign.py, runs/foreign_onetrainer.py) fill it in, and runs/foreign_spec.py decides what becomes of
each flag. Everything in it is text from elsewhere: only plain values are taken, and of a limited size.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from presets import read_table
from runs import env_file
from runs.files import RunError

TABLES = read_table("foreign.toml")
MAX_FLAGS, SHOWN = 2000, 160  # SHOWN: characters of a value in a message
SEVERAL_SIDES = "The data set is trained at several resolutions; Hangproof trains at the largest one."


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
    differs. rows: one for each setting that is decided. kohya: whether a flag that it does not have has the default of
    kohya's trainers. As a run: fields of a RunSpec, `extra` included.
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
    included: set[str] = field(default_factory=set)  # flags whose file was read
    gpus: int = 1
    kohya: bool = True
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
        if value is None or value is False or value == "" or not isinstance(flag, str):  # 0 is a value
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
        self.labels |= {flag: label} if label and label != flag else {}
        return None

    def add_folder(self, path: str, repeats: object = None, trigger: object = None) -> None:
        """Add a folder of images. What is no plain number or text is left out."""
        whole = isinstance(repeats, int) and not isinstance(repeats, bool) and 1 <= repeats <= 10**6
        word = " ".join(trigger.split())[:200] if isinstance(trigger, str) else ""
        self.folders.append(ImageFolder(path[:4000], repeats if whole else None, word))  # type: ignore[arg-type]

    def add_prompts(self, texts: Iterable[object], trigger: str = "[trigger]") -> None:
        """Set the sample prompts, each as one line; at most 100. trigger: what `[trigger]` stands for in them."""
        lines = (" ".join(one.replace("[trigger]", trigger).split()) for one in texts if isinstance(one, str))
        self.prompts = [line[:1000] for line in lines if line][:100]

    def largest(self, sides: Sequence[object]) -> int:
        """The largest of the resolutions of a data set, with a note where it has several."""
        if len(sides) > 1:
            self.notes.append(SEVERAL_SIDES)
        return max(side for side in sides if isinstance(side, int))


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


def tables(value: object) -> list[dict[str, Any]]:
    """The tables of a list of a file; at most 1000."""
    return [one for one in value if isinstance(one, dict)][:1000] if isinstance(value, list) else []
