"""Carry out what lint proposes: change the words concerned, keep every other byte of the script.

Each change is made on its own and the script read again, so that no change has to know of the others.
"""

import itertools
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from presets import lint
from presets.tables import ROOT, PresetError
from presets.training import Training, trainings

ROUNDS = 200  # more changes than rules × flags: a mend that does not hold would go round for ever


@dataclass
class Mended:
    """The new script, what was mended, and files to be written beside it."""

    text: str
    mended: list[str]
    files: dict[Path, str] = field(default_factory=dict)


def mend(text: str, name: str = "train.sh", base: Path | None = None, mounts: str = "") -> Mended:
    """A script that lints clean as far as can be, and runs the same training.

    Raises:
        PresetError: a mend did not hold (a fault of ours: the script is left as it was).
    """
    out = Mended(text, [])
    for _ in range(ROUNDS):
        step = _next(out.text, name, base, mounts)
        if step is None:
            left = {finding.id for finding in lint.lint(out.text, name, base, mounts)}
            found = [finding.id for finding in lint.lint(text, name, base, mounts)]
            out.mended = [rule for rule in dict.fromkeys(found) if rule not in left]
            return out
        rule, index, changes = step
        before = (out.text, dict(out.files))
        for change in changes:
            out.text = _apply(out.text, trainings(out.text, name, base, mounts)[index], change, out.files)
            _write(out.files)
        if (out.text, out.files) == before:
            raise PresetError(f"{name}: the mend of {rule} changed nothing; mend it by hand")
    raise PresetError(f"{name}: the mends go round in a circle; mend it by hand")


def _write(files: dict[Path, str]) -> None:
    """Config files are written at once, because the next look at the script reads them."""
    for path, content in files.items():
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")


def _next(text: str, name: str, base: Path | None, mounts: str):
    for index, training in enumerate(trainings(text, name, base, mounts)):
        for rule, changes in lint.check(training):
            if changes and not _out_of_reach(text, training, changes):
                return rule, index, changes
    return None


def _out_of_reach(text: str, t: Training, changes: list[lint.Change]) -> bool:
    """Whether a change cannot be made here: a second trap, or a line that cannot be put before the command."""
    for change in changes:
        if isinstance(change, lint.Stage) and (
            re.search(r"^\s*trap\b.*\bEXIT\b", text, re.MULTILINE) or not _line_can_go_before(text, t)
        ):
            return True
    return False


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _line_can_go_before(text: str, t: Training) -> bool:
    start = _line_start(text, t.command.start)
    before = text[:start].rstrip()
    return not text[start : t.command.start].strip() and not before.endswith(("\\", "&&", "||", "|"))


def _quote(value: str, language: str) -> str:
    if language == "sh":
        return shlex.quote(value)
    return value if re.fullmatch(r"[\w./:\\=+,-]+", value) else '"' + value.replace("%", "%%") + '"'


def _apply(text: str, t: Training, change: lint.Change, files: dict[Path, str]) -> str:
    match change:
        case lint.Drop(flag):
            return _drop(text, t, flag, files)
        case lint.Set(flag, values):
            return _set(text, t, flag, list(values))
        case lint.Guard():
            return _guard(text, t)
        case lint.Stage(local, wanted):
            return _stage(text, t, local, wanted)


def _edit(text: str, t: Training, replaced: dict[int, list[str]]) -> str:
    """Put other words (possibly none) in the place of some; all words of one expansion are then written out."""
    words = t.command.words
    spans: dict[tuple[int, int], list[int]] = {}
    for i, word in enumerate(words):
        spans.setdefault((word.start, word.end), []).append(i)
    ends = sorted(end for _, end in spans)
    for (start, end), members in sorted(spans.items(), reverse=True):
        if not any(i in replaced for i in members):
            continue
        parts: list[str] = []
        for i in members:
            kept = text[start:end] if words[i].alone else _quote(words[i].value or "", t.language)
            parts += replaced.get(i, [kept])
        if parts:
            text = text[:start] + " ".join(parts) + text[end:]
        else:
            before = max((e for e in ends if e <= start), default=start)
            text = text[:before] + text[end:]
    return text


def _drop(text: str, t: Training, flag: str, files: dict[Path, str]) -> str:
    if flag not in t.flags:
        return text
    indices = t.flags[flag].earlier + t.flags[flag].words
    if indices:
        return _edit(text, t, {i: [] for i in indices})
    return _drop_from_config(text, t, flag, files)


def _drop_from_config(text: str, t: Training, flag: str, files: dict[Path, str]) -> str:
    """A switch in a config file cannot be turned off from the command line: point the command to a mended copy."""
    import tomlkit

    source = t.config
    table = tomlkit.parse(source.read_text(encoding="utf-8-sig"))
    for holder in (table, *(v for v in table.values() if isinstance(v, dict))):
        if flag in holder:
            del holder[flag]
    copy = source if source.stem.endswith(".mended") else source.with_name(f"{source.stem}.mended.toml")
    files[copy] = tomlkit.dumps(table)
    written = t.text("config_file") or ""
    return (
        _set(text, t, "config_file", [written.removesuffix(".toml").removesuffix(".mended") + ".mended.toml"]) or text
    )


def _set(text: str, t: Training, flag: str, values: list[str]) -> str:
    words = [f"--{flag}", *(_quote(v, t.language) for v in values)]
    known = t.flags.get(flag)
    if known and known.words:
        first, *rest = known.words
        return _edit(text, t, {first: words, **{i: [] for i in (*rest, *known.earlier)}})
    if known and not values:
        return text
    at = t.command.end
    return text[:at] + _separator(text, t) + " ".join(words) + text[at:]


def _separator(text: str, t: Training) -> str:
    """What stands between two flags of the command: a continued line where it has some, else a blank."""
    words = t.command.words[t.script :]
    for before, after in reversed(list(itertools.pairwise(words))):
        gap = text[before.end : after.start]
        if "\n" in gap and not gap.strip(" \t\r\n\\^"):
            return gap
    return " "


def _guard(text: str, t: Training) -> str:
    """`… script.py` becomes `… -m sd_scripts_patches script.py`, with our folder on PYTHONPATH."""
    words = t.command.words
    runner = ["-m", "sd_scripts_patches"] if t.script else ["python", "-m", "sd_scripts_patches"]
    word = words[t.script]
    shown = text[word.start : word.end] if word.alone else _quote(word.value or "", t.language)
    text = _edit(text, t, {t.script: [*runner, shown]})
    if t.language == "cmd":
        start = _line_start(text, t.command.start)
        newline = "\r\n" if "\r\n" in text else "\n"
        return text[:start] + f'set "PYTHONPATH={ROOT};%PYTHONPATH%"{newline}' + text[start:]
    first = words[_program(text, t)].start
    path = shlex.quote(str(ROOT)) + '"${PYTHONPATH:+:$PYTHONPATH}"'
    return text[:first] + f"PYTHONPATH={path} " + text[first:]


def _program(text: str, t: Training) -> int:
    """The index of the word that names the program, after assignments such as `CUDA_VISIBLE_DEVICES=0`."""
    assignment = re.compile(r"[A-Za-z_]\w*=")
    return next((i for i, w in enumerate(t.command.words) if not assignment.match(text, w.start)), 0)


def _stage(text: str, t: Training, local: str, wanted: str) -> str:
    """Write to `local`; a trap copies it to `wanted` when the script ends, however it ends, and keeps its exit code."""
    text = _set(text, t, "output_dir", [local])
    first = _program(text, t)
    if t.command.words[first].value == "exec":
        text = text[: t.command.words[first].start] + text[t.command.words[first + 1].start :]
    copy = f"mkdir -p -- {shlex.quote(wanted)} && cp -R -- {shlex.quote(local)}/. {shlex.quote(wanted)}/"
    start = _line_start(text, t.command.start)
    indent = text[start : t.command.start]
    return (
        text[:start]
        + f"{indent}mkdir -p -- {shlex.quote(local)}\n{indent}trap {shlex.quote(copy)} EXIT\n"
        + text[start:]
    )
