"""A run's script as a person edited it: kept byte for byte, and changed only where the run itself changes.

The spec has the edited script and the script that it gave at that moment. While the run's job gives the same script,
the edited one is used as it is. When it gives another one (to resume, a mitigation, a longer training, another name or
machine), the difference is applied to the edited script: flags of the training command by their names, the lines before
the command by the lines that the person left as they were. Nothing of a script is ever executed here.
"""

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from presets import PresetError, lint
from presets.fix import set_flags
from presets.training import Training, trainings
from runs.files import Fault, RunError
from runs.paths import script_name

MAX_BYTES = 64_000  # of a script; one with 500 flags has 20 kB
CHECK_S = 5.0
# Flags by which the monitor finds the run's files: an edited script has those of its run.
OWN = ("output_dir", "output_name", "dataset_config")
NO_COMMAND = (
    "The script starts no trainer that Hangproof knows, so a restart could not resume it. Keep the command that starts "
    "the training (accelerate launch …)"
)
SEVERAL = "The script has {count} training commands, and a run has one. Keep one; start the others as runs of their own"


@dataclass(frozen=True)
class Problem:
    """Something wrong with an edited script. level: "error" (Start refuses it) or a level of presets/lint.toml."""

    level: str
    line: int
    text: str
    advice: str


def only(text: str, platform: str = sys.platform) -> Training:
    """The training command of a script. Raises RunError: there is none, or several."""
    found = trainings(text, script_name(platform=platform))
    if len(found) != 1:
        raise RunError([Fault("script", NO_COMMAND if not found else SEVERAL.format(count=len(found)))])
    return found[0]


def flags(t: Training) -> dict[str, list[str | None]]:
    """The written flags with their values; None for a value that only the shell knows."""
    return {flag: known.values for flag, known in t.flags.items() if known.words}


# The script of a run --------------------------------------------------------------------------------------------------


def merged(mine: str, base: str, now: str, platform: str = sys.platform) -> tuple[str, list[str]]:
    """The edited script of a run after what changed since it was edited, and what could not be applied, each as the end
    of a sentence.

    Args:
        mine: the edited script. base: the one that was edited. now: the one that the run's job gives without the edit.

    Raises:
        RunError: the script was edited for another system, or cannot be read.
    """
    if base == now:
        return mine, []
    if (base.lstrip().lower().startswith("@echo off")) != platform.startswith("win"):
        system = "Windows" if not platform.startswith("win") else "Linux or macOS"
        raise RunError(f"the edited script is for {system}; remove [edited] from run.toml to use the generated one")
    try:
        old, new = only(base, platform), only(now, platform)
        before, after = flags(old), flags(new)
        changed = [flag for flag in {**before, **after} if before.get(flag) != after.get(flag)]
        wanted = {flag: _known(after.get(flag)) for flag in changed}
        text, refused = set_flags(mine, wanted, script_name(platform=platform))
        head, rest = _split(text, only(text, platform))
    except PresetError as error:
        raise RunError(f"the edited script cannot be read: {error}") from error
    head, lines = _patched(head, _split(base, old)[0], _split(now, new)[0])
    left = [f"--{flag} is not written in the script as a plain option" for flag in refused]
    return head + rest, [*left, *(f"the line “{line.strip()}” is not in the script" for line in lines)]


def _known(values: list[str | None] | None) -> list[str] | None:
    return None if values is None else [value or "" for value in values]


def _split(text: str, t: Training) -> tuple[str, str]:
    """The text up to the training script's name, and the rest: its flags and what follows."""
    end = t.command.words[t.script].end
    return text[:end], text[end:]


def _patched(mine: str, base: str, now: str) -> tuple[str, list[str]]:
    """Apply the changed lines of base → now to the lines of `mine` that are still those of base; the others."""
    ours, old, new = (text.splitlines(keepends=True) for text in (mine, base, now))
    at: dict[int, int] = {}  # line of base → the same line of mine
    for block in difflib.SequenceMatcher(None, old, ours, autojunk=False).get_matching_blocks():
        at |= {block.a + n: block.b + n for n in range(block.size)}
    edits: list[tuple[int, int, list[str]]] = []  # lines of mine from, to; what they become
    left: list[str] = []
    for start, end, lines in _changed_lines(old, new):
        first = at.get(start)
        if start == end and start - 1 in at:
            first = at[start - 1] + 1
        if first is not None and [at.get(n) for n in range(start, end)] == list(range(first, first + end - start)):
            edits.append((first, first + end - start, lines))
        else:
            left.append((old[start:end] or lines)[0])
    for first, last, lines in sorted(edits, key=lambda edit: edit[:2], reverse=True):
        ours[first:last] = lines
    comments = ("#", "rem ")
    return "".join(ours), [line for line in left if line.strip() and not line.lower().startswith(comments)]


def _changed_lines(old: list[str], new: list[str]) -> Iterator[tuple[int, int, list[str]]]:
    """The lines of `old` (from, to) that differ, and what they become. As many lines for as many: changes one by one,
    so that one line that a person edited does not keep the others."""
    for kind, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "replace" and j - i == m - k:
            yield from ((i + n, i + n + 1, [new[k + n]]) for n in range(j - i))
        elif kind != "equal":
            yield i, j, new[k:m]


# What is wrong with an edited script ----------------------------------------------------------------------------------


def problems(text: str, generated: str, platform: str = sys.platform) -> list[Problem]:
    """What is wrong with a script; first those of level "error", which prevent a start.

    Args:
        generated: the script that the run's spec gives.
    """
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        return [Problem("error", 1, f"The script is larger than {MAX_BYTES // 1000} kB", "Shorten it")]
    if "\0" in text:
        return [Problem("error", _line(text, text.index("\0")), "The script contains a NUL character", "Remove it")]
    found = _syntax(text, platform)
    try:
        trained = trainings(text, script_name(platform=platform), Path())
        findings = lint.lint(text, script_name(platform=platform), Path())
    except (PresetError, RecursionError, ValueError) as error:
        return [*found, Problem("error", 1, f"The script cannot be read: {error}", "Correct it")]
    if len(trained) != 1:
        line = 1 if not trained else _line(text, trained[1].command.start)
        what, _, advice = (NO_COMMAND if not trained else SEVERAL.format(count=len(trained))).partition(". ")
        return [*found, Problem("error", line, what, advice)]
    found += _own(text, trained[0], only(generated, platform))
    for one in findings:  # a run without the guards is none of Hangproof
        level = "error" if one.id == "unguarded" else one.level
        found.append(Problem(level, one.line, one.why, one.fix))
    return sorted(found, key=lambda one: (one.level != "error", one.line))


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _own(text: str, t: Training, wanted: Training) -> list[Problem]:
    """Whether the command is that of this run: its trainer, its folder, its data set."""
    line, found = _line(text, t.command.words[t.script].start), []
    mine, ours = (one.command.words[one.script].shape.replace("\\", "/").rpartition("/")[2] for one in (t, wanted))
    if mine != ours:
        what = f"The script starts {mine}, but the form's base model and trainer need {ours}"
        found.append(Problem("error", line, what, "Choose the trainer again in step 1, or use the generated script"))
    for flag in (*OWN, *(["save_model_as"] if t.has("save_model_as") else [])):
        value, right = t.text(flag), wanted.text(flag)
        if value != right and (t.has(flag) or not t.opaque):
            known = t.flags.get(flag)
            where = _line(text, t.command.words[known.words[0]].start) if known and known.words else line
            what = f"--{flag} is {value}, not {right}" if value else f"--{flag} is missing"
            advice = f"Hangproof finds the run's files by it: set --{flag} {right}"
            found.append(Problem("error", where, what, advice))
    return found


def _syntax(text: str, platform: str) -> list[Problem]:
    """What bash says to the script's syntax. `bash -n` reads a script and executes nothing of it."""
    if platform.startswith("win") or os.name == "nt":
        return []
    clean = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"}  # no BASH_ENV, which bash would execute
    try:
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-n", "-s"],
            input=text.encode("utf-8", "replace"),
            capture_output=True,
            timeout=CHECK_S,
            env=clean,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [Problem("error", 1, f"bash did not read the script within {CHECK_S:.0f} s", "Simplify it")]
    except OSError:
        return []  # no bash here
    if done.returncode == 0:
        return []
    out = done.stderr.decode("utf-8", "replace").strip().splitlines()
    match = re.search(r"line (\d+): (.*)", out[0]) if out else None
    line, what = (int(match[1]), match[2]) if match else (1, "bash cannot read the script")
    return [Problem("error", line, f"bash: {what[:300]}", "Correct the line, or undo your last change")]


def diff(before: str, after: str) -> list[str]:
    """The changed lines with their context, each starting with "+", "-", "@" or a space; none where nothing changed."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)
    return [line for line in lines if not line.startswith(("---", "+++"))][:400]


# Flags that the run's name and folder determine, and not a setting.
OF_THE_RUN = (*OWN, "sample_prompts", "logging_dir")


def follow(mine: str, base: str, now: str, platform: str = sys.platform) -> str:
    """The edited script with the run's present name and folder, where the person left them as they were in `base`.

    Args:
        base: the script that was edited. now: the one that the form gives.
    """
    try:
        edited, old, new = (flags(only(text, platform)) for text in (mine, base, now))
    except RunError:
        return mine
    kept = [flag for flag in OF_THE_RUN if edited.get(flag) == old.get(flag) != new.get(flag) and flag in new]
    text = set_flags(mine, {flag: _known(new[flag]) for flag in kept}, script_name(platform=platform))[0]
    named = dict(zip(_naming(base), _naming(now), strict=False))
    return "".join(named.get(line, line) for line in text.splitlines(keepends=True))


def _naming(text: str) -> list[str]:
    """The lines of a generated script with the run's name: the comments at its head, and the file of its secrets."""
    lines = text.splitlines(keepends=True)
    comments = [line for line in lines[:5] if line.lower().startswith(("#", "rem "))]
    return [*comments, *(line for line in lines if line.startswith(("env_file=", 'set "env_file=')))]
