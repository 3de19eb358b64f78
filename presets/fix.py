"""Apply the changes that lint proposes: replace the words concerned and keep every other byte of the script.

Only words that stand alone in the command are changed: what comes from a variable or an array is left to a person. The script is parsed again after each change, so that no change depends on the positions of another.
"""

import itertools
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from presets import lint
from presets.tables import ROOT, PresetError, _table
from presets.training import Training, program, quote, trainings

MAX_ROUNDS = 200  # more than rules × flags: stops a fix that brings its own finding back


class _Impossible(Exception):
    """A change cannot be made in this script."""


@dataclass
class Fixed:
    """The new script, the rules that were fixed, and the changes that were made."""

    text: str
    fixed: list[str] = field(default_factory=list)
    changes: list[tuple[str, int, lint.Change]] = field(default_factory=list)  # rule, index of the command, change


def fix(text: str, name: str = "train.sh", base: Path | None = None, only: str = "") -> Fixed:
    """The script with every finding fixed that can be fixed automatically; it trains the same.

    Args: as presets.training.trainings.
        only: fix this rule alone.

    Raises:
        PresetError: a fix had no effect, or fixes undid each other (a bug in lint). The script is unchanged.
    """
    out = Fixed(text)
    impossible: set[tuple[str, int]] = set()
    for _ in range(MAX_ROUNDS):
        found = [(r, i, c) for i, t in enumerate(trainings(out.text, name, base)) for r, c in lint.check(t) if c]
        rule, index, changes = next(
            (one for one in found if one[:2] not in impossible and only in ("", one[0])), ("", 0, [])
        )
        if not rule:
            left = {finding.id for finding in lint.lint(out.text, name, base)}
            before = [finding.id for finding in lint.lint(text, name, base)]
            out.fixed = [rule for rule in dict.fromkeys(before) if rule not in left]
            return out
        new = out.text
        try:
            for change in changes:
                new = _apply(new, trainings(new, name, base)[index], change)
        except _Impossible:
            impossible.add((rule, index))
            continue
        if new == out.text:
            raise PresetError(f"{name}: the automatic fix of {rule} had no effect; fix it by hand")
        out.text = new
        out.changes += [(rule, index, change) for change in changes]
    raise PresetError(f"{name}: the automatic fixes undo each other; fix the findings by hand")


def _apply(text: str, t: Training, change: lint.Change) -> str:
    if t.language == "ps":
        raise _Impossible
    match change.kind:
        case "Drop":
            return _splice(text, _written(text, t, change.flag, None))
        case "Set":
            return _splice(text, _written(text, t, change.flag, list(change.values)))
        case "Guard":
            return _guard(text, t)
        case "Unmark":
            return text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n")


Edit = tuple[int, int, str]


def _splice(text: str, edits: list[Edit]) -> str:
    """Replace several parts of a text."""
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _edits(text: str, t: Training, replaced: dict[int, list[str]]) -> list[Edit]:
    """The edits that replace some words by others, or by none. Raises _Impossible: one of them does not stand alone."""
    words = t.command.words
    if not all(words[i].alone for i in replaced):
        raise _Impossible
    return [
        (words[i].start, words[i].end, " ".join(new))
        if new
        else _removal(text, words[i].start, words[i].end, t.language)
        for i, new in replaced.items()
    ]


def _removal(text: str, start: int, end: int, language: str) -> Edit:
    """Remove a word with the spaces and line continuations before it."""
    mark = r"\^" if language == "cmd" else r"\\"
    before = re.search(rf"(?:[ \t]|{mark}\r?\n)*$", text[:start])
    return before.start() if before else start, end, " " if text[end : end + 1] in ("<", ">") else ""


def _mentions(t: Training, flag: str) -> list[list[int]]:
    """The words of each mention of a flag with its own value. What follows may be other flags in a variable, so it stays."""
    count = 1 if flag in _table("lint.toml")["switches"] else 2
    mentions: list[list[int]] = []
    for i in t.flags[flag].words:
        shape = t.command.words[i].shape
        if shape == f"--{flag}" or shape.startswith(f"--{flag}="):
            mentions.append([i])
        elif len(mentions[-1]) < count and "=" not in t.command.words[mentions[-1][0]].shape:
            mentions[-1].append(i)
    return mentions


def _written(text: str, t: Training, flag: str, values: list[str] | None, whole: bool = False) -> list[Edit]:
    """The edits that set a flag where it is, or at the end of the command where it is not; None removes it.

    Args:
        whole: replace all words after the flag; else each mention of the flag with its own value.

    Raises:
        _Impossible: the config file sets it, and the command line cannot turn it off; or the command has an open quote.
    """
    new = [] if values is None else [f"--{flag}", *(quote(value, t.language) for value in values)]
    known = t.flags.get(flag)
    if known and known.words:
        mentions = _mentions(t, flag)
        gone = known.words if whole else [i for mention in mentions for i in mention]
        return _edits(text, t, {**{i: [] for i in gone}, mentions[-1][0]: new})
    if values is None or (known and not values):  # a switch of the config file is on
        if known and values is None:
            raise _Impossible
        return []
    if t.command.unclosed:
        raise _Impossible  # the flag would become part of the open quote
    return [(t.command.end, t.command.end, _separator(text, t) + " ".join(new))]


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
    edits = _edits(text, t, {t.script: [*runner, text[word.start : word.end]]})
    if t.language == "cmd":
        at = words[0].start
        return _splice(text, [*edits, (at, at, f'set "PYTHONPATH={ROOT};%PYTHONPATH%" && ')])
    index = program(t.command)
    if words[index].value == "sudo" and not words[index + 1].shape.startswith("-"):
        index += 1  # sudo does not pass the variables of its caller on
    at = words[index].start + text.startswith("!", words[index].start)
    path = shlex.quote(str(ROOT)) + '"${PYTHONPATH:+:$PYTHONPATH}"'
    return _splice(text, [*edits, (at, at, f"PYTHONPATH={path} ")])


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
            text = _splice(text, _written(text, found[0], flag, values, whole=True))
        except _Impossible:
            refused.append(flag)
    return text, refused
