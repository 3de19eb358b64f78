"""A training command as lint sees it: which script, started by what, with which flags, from the line or a config file."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath

from presets import shell
from presets.tables import PresetError, _table, read_toml
from presets.words import Command

MODULES = ("trainer", "sd_scripts_patches")


@dataclass
class Flag:
    """A flag's values (None: cannot be known) and its words; no words when a config file sets it."""

    values: list[str | None]
    words: list[int] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)  # words of the same flag that a later one overrides


@dataclass
class Training:
    """One command that trains."""

    command: Command
    language: str
    script: int  # index of the word that names the script or module
    module: str  # "trainer", "sd_scripts_patches", or "" where sd-scripts runs by itself
    flags: dict[str, Flag]
    launch: dict[str, str | None]  # options of accelerate or torchrun
    opaque: bool  # something stands for words that cannot be known: nothing is said about what is absent
    config: Path | None = None
    mounts: str = ""  # /proc/mounts
    base: Path = Path()  # relative paths are taken from here

    def has(self, flag: str) -> bool:
        """Whether a switch is on or a flag given."""
        return flag in self.flags

    def text(self, flag: str) -> str | None:
        """A flag's first value; None when it is not given or cannot be known."""
        values = self.flags[flag].values if flag in self.flags else []
        return values[0] if values else None

    def number(self, flag: str) -> float | None:
        """A flag's value as a number; None when it has none."""
        try:
            return float(self.text(flag) or "")
        except ValueError:
            return None

    def lacks(self, flag: str) -> bool:
        """Whether a flag is certainly not given."""
        return not self.opaque and flag not in self.flags


def trainings(text: str, name: str = "train.sh", base: Path | None = None, mounts: str = "") -> list[Training]:
    """The training commands of a script (or of a bare command line).

    Args:
        name: the file's name, for its dialect. base: where relative paths start. mounts: /proc/mounts.
    """
    language = shell.dialect(name, text)
    base = base or Path()
    return [t for c in shell.commands(text, language) if (t := _training(c, language, base, mounts))]


def file_name(path: str) -> str:
    """The last part of a path, whichever slashes it has."""
    return PureWindowsPath(path).name if "\\" in path else PurePosixPath(path).name


def _training(command: Command, language: str, base: Path, mounts: str) -> Training | None:
    scripts = _table("lint.toml")["scripts"]
    script, module = None, ""
    for i, word in enumerate(command.words):
        value = word.value or ""
        if value in MODULES and i and command.words[i - 1].value == "-m":
            script, module = i, value
            if value == "trainer":
                break
        elif file_name(word.shape) in scripts:
            script = i
            break
    if script is None:
        return None
    if module == "sd_scripts_patches" and file_name(command.words[script].shape) not in scripts:
        return None  # `check DIR`, or a module that is run through the launcher
    flags = dict(_flags(command, script + 1))
    before = {f: (v.values[-1] if v.values else "") for f, v in _flags(command, 0, script)}
    training = Training(command, language, script, module, flags, before, command.opaque, mounts=mounts, base=base)
    _read_config(training)
    return training


def _flags(command: Command, start: int, end: int | None = None) -> Iterator[tuple[str, Flag]]:
    found: dict[str, Flag] = {}
    flag = None
    for i in range(start, len(command.words) if end is None else end):
        value = command.words[i].value
        if value is not None and re.match(r"--[A-Za-z]", value):
            name, equals, rest = value[2:].partition("=")
            name = name.replace("-", "_") if end is not None else name
            earlier = [*found[name].earlier, *found[name].words] if name in found else []
            flag = found[name] = Flag([rest] if equals else [], [i], earlier)
        elif flag is not None:
            flag.values.append(value)
            flag.words.append(i)
    yield from found.items()


def _read_config(training: Training) -> None:
    """Lay the command line over the `--config_file` of the training (kohya_ss writes all settings into one)."""
    if not training.has("config_file") or training.module == "trainer":
        return
    name = training.text("config_file")
    path = training.base / (name if (name or "").endswith(".toml") else f"{name}.toml") if name else None
    if path is None or not path.is_file():
        training.opaque = True
        return
    try:
        table = read_toml(path)
    except PresetError:
        training.opaque = True
        return
    training.config = path
    for key, value in table.items():
        for flag, setting in value.items() if isinstance(value, dict) else [(key, value)]:
            if setting is False or setting is None or flag in training.flags:
                continue
            values = setting if isinstance(setting, list) else [] if setting is True else [setting]
            training.flags[flag] = Flag([str(v) for v in values])
