"""Finds the training commands of a script: script or module, launcher options, flags (also those of a config file)."""

import itertools
import math
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from presets import windows
from presets.shell import Bash
from presets.syntax import Command
from presets.tables import PresetError, read_table, read_toml

MODULES = ("trainer", "sd_scripts_patches")
FLAG = re.compile(r"--[A-Za-z]")


def dialect(name: str, text: str) -> str:
    """The language of a script: `cmd` for batch files, `ps` for PowerShell, else `sh`."""
    if name.lower().endswith(".ps1"):
        return "ps"
    batch = name.lower().endswith((".bat", ".cmd")) or re.match(r"\s*@?echo off", text, re.IGNORECASE)
    return "cmd" if batch else "sh"


def commands(text: str, language: str) -> list[Command]:
    """The commands of a script, in order."""
    return {"cmd": windows.batch, "ps": windows.powershell}.get(language, lambda text: Bash(text).commands())(text)


def quote(value: str, language: str) -> str:
    """A value as a word of the language; PowerShell is only read."""
    return windows.quote(value) if language == "cmd" else shlex.quote(value)


@dataclass
class Flag:
    """The values of a flag (None: unknown), those of its last mention, and the indices of the words of all mentions; no
    words where a config file sets it."""

    values: list[str | None]
    words: list[int] = field(default_factory=list)


@dataclass
class Training:
    """One training command."""

    command: Command
    language: str
    script: int  # index of the word with the script or module
    module: str  # "trainer", "sd_scripts_patches", or "" where sd-scripts runs without guards
    flags: dict[str, Flag]
    launch: dict[str, str | None]  # options of accelerate or torchrun
    opaque: bool  # some words are unknown, so no flag is known to be absent
    config: Path | None = None
    base: Path = Path()  # the folder that relative paths start from
    source: str = ""  # the whole script
    cut_at: int | None = None  # where flags follow that the command does not get
    launcher: int = 0  # index of the word that starts the script: accelerate, python, or the script itself

    def has(self, flag: str) -> bool:
        """Whether a flag is set."""
        return flag in self.flags

    def text(self, flag: str) -> str | None:
        """The first value of a flag; None when the flag is not set or its value is unknown."""
        values = self.flags[flag].values if flag in self.flags else []
        return values[0] if values else None

    def number(self, flag: str) -> float | None:
        """The first value of a flag as a number; None when it is not a finite number."""
        try:
            number = float(self.text(flag) or "")
        except ValueError:
            return None
        return number if math.isfinite(number) else None

    def lacks(self, flag: str) -> bool:
        """Whether a flag is known to be absent."""
        return not self.opaque and flag not in self.flags


def trainings(text: str, name: str = "train.sh", base: Path | None = None, plain: bool = False) -> list[Training]:
    """The training commands of a script (or of a bare command line).

    Args:
        name: the file's name, which decides the dialect. base: the folder that relative paths start from.
        plain: also musubi-tuner's scripts where no guarded launcher starts them.
    """
    language = dialect(name, text)
    found, out = commands(text, language), []
    for command, following in itertools.zip_longest(found, found[1:]):
        if training := _training(command, text, language, base or Path(), plain):
            _, newline, indent = text[command.end : following.start].rpartition("\n") if following else ("", "", "")
            # A next line that starts with a flag: a line continuation is missing before it.
            if newline and not indent.strip() and re.match(r"--?[A-Za-z]", following.words[0].shape):
                training.cut_at, training.opaque = following.start, True
            out.append(training)
    return out


def file_name(path: str) -> str:
    """The last part of a path with slashes of either kind."""
    return PureWindowsPath(path).name if "\\" in path else PurePosixPath(path).name


def _training(command: Command, text: str, language: str, base: Path, plain: bool) -> Training | None:
    scripts, guarded = read_table("lint.toml")["scripts"], read_table("lint.toml")["guarded_scripts"]
    script, module = None, ""
    for i, word in enumerate(command.words):
        file = file_name(word.shape)
        if word.value in MODULES and i and command.words[i - 1].value == "-m":
            script, module = i, word.value
            if module == "trainer":
                break
        elif file in scripts or ((module or plain) and file in guarded):
            script = i
            break
    launcher = None if script is None else _launcher(command, script)
    if script is None or launcher is None:
        return None
    if module == "sd_scripts_patches" and file_name(command.words[script].shape) not in (*scripts, *guarded):
        return None  # `check DIR`, or a module that the launcher runs
    flags, before = flags_of(command, script + 1), flags_of(command, 0, script)
    launch = {flag: (known.values or [""])[-1] for flag, known in before.items()}
    training = Training(
        command, language, script, module, flags, launch, command.opaque, base=base, source=text, launcher=launcher
    )
    if training.has("config_file") and module != "trainer":
        _read_config(training)
    return training


def program(command: Command) -> int:
    """The index of the program's name, after assignments such as `CUDA_VISIBLE_DEVICES=0`."""
    return next((i for i, word in enumerate(command.words) if not re.match(r"[A-Za-z_]\w*=", word.shape)), 0)


def _launcher(command: Command, script: int) -> int | None:
    """The index of the program that starts the script; None where a command such as `cp` or `echo` only mentions it."""
    table = read_table("lint.toml")
    files = [file_name(word.value or "").lower().lstrip("!") for word in command.words[:script]]
    names = [re.sub(r"(\.exe|\.cmd|\.bat)$", "", file) for file in files]
    first = program(command)
    while first < script and names[first] in table["wrappers"]:
        first += 1
    if first >= script or command.words[first].value is None:
        return min(first, script)
    starts = [i for i, name in enumerate(names) if re.fullmatch(table["launchers"], name)]
    if not starts or names[first] in table["printers"]:
        return None
    between = [word.value or "" for word in command.words[starts[-1] + 1 : script + 1]]
    modules = [after for word, after in itertools.pairwise(between) if word == "-m"]
    other_script = any(word.endswith(".py") for word in between[:-1])
    known = all(module in MODULES or module in table["launch_modules"] for module in modules)
    return starts[-1] if known and not other_script else None


def flags_of(command: Command, start: int, end: int | None = None) -> dict[str, Flag]:
    """The flags among the words of a command from `start`; before `end`, those of a launcher, with `_` for `-`."""
    found: dict[str, Flag] = {}
    flag = None
    for i, word in list(enumerate(command.words))[start:end]:
        value, shape = word.value, word.shape
        if FLAG.match(shape) and (value is not None or "=" in shape.partition("\0")[0]):
            name, equals, rest = shape[2:].partition("=")
            name = name.replace("-", "_") if end is not None else name
            before = found[name].words if name in found else []
            flag = found[name] = Flag([None if value is None else rest] if equals else [], [*before, i])
        elif flag is not None:
            flag.values.append(value)
            flag.words.append(i)
    return found


def _read_config(training: Training) -> None:
    """Add the flags of the `--config_file` (kohya_ss writes all settings there); the command line overrides them."""
    path = training.base / f"{(training.text('config_file') or '').removesuffix('.toml')}.toml"
    try:
        table = read_toml(path)
    except (OSError, PresetError):
        training.opaque = True
        return
    training.config, settings = path, dict[str, Any]()
    for key, value in table.items():
        settings |= value if isinstance(value, dict) else {key: value}
    for flag, setting in settings.items():
        if setting is not False and flag not in training.flags:
            values = setting if isinstance(setting, list) else [] if setting is True else [setting]
            training.flags[flag] = Flag([str(value) for value in values])
