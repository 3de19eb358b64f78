"""Apply the changes that lint proposes: replace the words concerned and keep every other byte of the script.

Only words that stand alone in the command are changed: what comes from a variable or an array is left to a person.
The script is parsed again after each change, so that no change depends on the positions of another.
"""

import itertools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from presets import lint
from presets.tables import ROOT, PresetError, read_table
from presets.training import Training, program, quote, trainings


class _Impossible(Exception):
    """A change cannot be made in this script."""


@dataclass
class Fixed:
    """The new script, the rules that were fixed, and the changes that were made."""

    text: str
    fixed: list[str] = field(default_factory=list)
    changes: list[tuple[str, int, lint.Change]] = field(default_factory=list)  # rule, index of the command, change


def fix(text: str, name: str = "train.sh", base: Path | None = None) -> Fixed:
    """The script with every finding fixed that can be fixed automatically; it trains the same.

    Args: as presets.training.trainings.

    Raises:
        PresetError: a fix had no effect (a bug in lint). The script is unchanged.
    """
    out, found = Fixed(text), trainings(text, name, base)
    for index, rule in itertools.product(range(len(found)), read_table("lint.toml")["rules"]):
        changes, new = lint.check(found[index]).get(rule), out.text
        if not changes:
            continue
        try:
            for change in changes:
                new = _apply(new, trainings(new, name, base)[index], change)
        except _Impossible:
            continue
        if new == out.text:
            raise PresetError(f"{name}: the automatic fix of {rule} had no effect; fix it by hand")
        out.text, found = new, trainings(new, name, base)
        out.changes += [(rule, index, change) for change in changes]
    left = {finding.id for finding in lint.lint(out.text, name, base)}
    before = [finding.id for finding in lint.lint(text, name, base)]
    out.fixed = [rule for rule in dict.fromkeys(before) if rule not in left]
    return out


def _apply(text: str, t: Training, change: lint.Change) -> str:
    if t.language == "ps":
        raise _Impossible
    match change.kind:
        case "Drop" | "Set":
            return _written(text, t, change.flag, list(change.values) if change.kind == "Set" else None)
        case "Guard":
            return _guard(text, t)
        case "Unmark":
            return text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n")


def _replace(text: str, t: Training, words: Mapping[int, list[str]], at: int = 0, added: str = "") -> str:
    """The text with some words of a command replaced by others, or removed, and with an addition.

    Raises:
        _Impossible: one of the words does not stand alone.
    """
    edits = [(at, at, added)]
    mark = "^" if t.language == "cmd" else "\\"
    gaps = (" ", "\t", f"{mark}\n", f"{mark}\r\n")
    for i, new in words.items():
        word = t.command.words[i]
        if not word.alone:
            raise _Impossible
        start, end, space = word.start, word.end, ""
        if not new:  # removed with the spaces and line continuations before it
            while gap := next((one for one in gaps if text.endswith(one, 0, start)), ""):
                start -= len(gap)
            space = " " if text.startswith(("<", ">"), end) else ""
        edits.append((start, end, " ".join(new) or space))
    for start, end, new_text in sorted(edits, reverse=True):
        text = text[:start] + new_text + text[end:]
    return text


def _written(text: str, t: Training, flag: str, values: list[str] | None, whole: bool = False) -> str:
    """The text with a flag set where it is, or at the end of the command where it is not; None removes it.

    Args:
        whole: replace all words after the flag; else each mention with its own value, because what follows may be
            other flags in a variable.

    Raises:
        _Impossible: the config file sets it, and the command line cannot turn it off; or the command has an open quote.
    """
    new = [] if values is None else [f"--{flag}", *(quote(value, t.language) for value in values)]
    known, words = t.flags.get(flag), t.command.words
    if known and known.words:
        mentions = [i for i in known.words if words[i].shape.partition("=")[0] == f"--{flag}"]
        own = [i + 1 for i in mentions if "=" not in words[i].shape and flag not in read_table("lint.toml")["switches"]]
        gone = known.words if whole else [*mentions, *(i for i in own if i in known.words and i not in mentions)]
        return _replace(text, t, {**{i: [] for i in gone}, mentions[-1]: new})
    if known and values is None:
        raise _Impossible
    if values is None or (known and not values):  # a switch of the config file is on
        return text
    if t.command.unclosed:
        raise _Impossible  # the flag would become part of the open quote
    return _replace(text, t, {}, t.command.end, _separator(text, t) + " ".join(new))


def _separator(text: str, t: Training) -> str:
    """The separator between two flags of the command: a line continuation if it uses them, else a space."""
    words = t.command.words[t.script :]
    for before, after in reversed(list(itertools.pairwise(words))):
        gap = text[before.end : after.start]
        if "\n" in gap and not gap.strip(" \t\r\n\\^"):
            return gap if gap[0] in " \t" else f" {gap}"
    return " "


def _guard(text: str, t: Training) -> str:
    """`… script.py` becomes `… -m sd_scripts_patches script.py`, with the project folder on PYTHONPATH."""
    words = t.command.words
    runner = ["-m", "sd_scripts_patches"] if t.script > t.launcher else ["python", "-m", "sd_scripts_patches"]
    word = words[t.script]
    guarded = {t.script: [*runner, text[word.start : word.end]]}
    if t.language == "cmd":
        return _replace(text, t, guarded, words[0].start, f'set "PYTHONPATH={ROOT};%PYTHONPATH%" && ')
    index = program(t.command)
    if words[index].value == "sudo" and not words[index + 1].shape.startswith("-"):
        index += 1  # sudo does not pass the variables of its caller on
    at = words[index].start + text.startswith("!", words[index].start)
    path = shlex.quote(str(ROOT)) + '"${PYTHONPATH:+:$PYTHONPATH}"'
    return _replace(text, t, guarded, at, f"PYTHONPATH={path} ")


def set_flags(text: str, wanted: dict[str, list[str] | None], name: str = "train.sh") -> tuple[str, list[str]]:
    """Set or remove flags of the only training command of a script; every other byte stays.

    Args:
        wanted: by flag, its values ([] for a switch), or None to remove it.

    Returns:
        The new text, and the flags that could not be changed because the script takes their words from elsewhere.

    Raises:
        PresetError: the script does not have exactly one training command.
    """
    refused = []
    for flag, values in wanted.items():
        found = trainings(text, name)
        if len(found) != 1:
            raise PresetError(f"{name}: has {len(found)} training commands, not one")
        known = found[0].flags.get(flag)
        try:
            if known and (not known.words or found[0].command.unclosed):  # the config file sets it
                raise _Impossible
            text = _written(text, found[0], flag, values, whole=True)
        except _Impossible:
            refused.append(flag)
    return text, refused
