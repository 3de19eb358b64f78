"""Retired names and phrases do not come back.

The project replaced its private English by the field's own words. The tables below list what was replaced and by what. Names
are compared as complete identifiers and phrases as complete words, so that `placement` and `recommend` are allowed. To retire
another word, add a row.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from runs.paths import ROOT

THIS = Path(__file__).resolve()
# Folders without source code of the project: environments, checkouts, and the data of a person who trains here.
SKIPPED = {"__pycache__", "sd-scripts", "musubi-tuner", "outputs", "datasets", "models", "node_modules"}
TEXT_FILES = {".md", ".toml", ".sh", ".bat", ".js", ".css"}

MODULES = {
    "book": "run_state",
    "faults_acts": "faults",
    "faults_guard": "cleanup",
    "faults_scene": "scenario",
    "faults_words": "report",
    "fits": "compatibility",
    "foresight": "prewarm",
    "inquiry": "probe",
    "leaving": "shutdown",
    "mend": "fix",
    "outlook": "status_writer",
    "place": "trainer_state",
    "reckoning": "legacy_state",
}
NAMES = {  # variables, arguments, attributes, functions and classes
    "Answer": "VerifyResult",
    "Chosen": "ResumePoint",
    "DoesNotFit": "Incompatible",
    "Ended": "KillResult",
    "Inquiry": "Probe",
    "One": "ProcessSample",
    "book": "run_state",
    "few": "min_samples",
    "foresight": "prewarm",
    "heed": "honor_stop_request",
    "inquiry": "probe",
    "leaving": "shutdown",
    "mend": "fix",
    "only_here": "local_main_only",
    "outlook": "status_writer",
    "quiet_s": "stalled_s",
    "reckoning": "legacy_state",
    "stepless_s": "no_step_s",
    "strays": "orphans",
    "strike": "kill",
    "take_over": "adopt",
    "told": "messages",
    "well_known": "warm_samples",
    "young_floor": "warmup_floor_s",
    "young_floor_s": "warmup_floor_s",
}
FUNCTIONS = {  # too common as variables, but unclear as the name of a function
    "asked": "handle_requests",
    "look": "poll",
    "over": "on_exit",
    "turn": "transition",
    "well": "on_progress",
}
PARTS = {  # words inside a name such as test_a_full_disk_is_told
    "foresight": "prewarm",
    "heed": "honor",
    "heeded": "honored",
    "inquiry": "probe",
    "mend": "fix",
    "mended": "fixed",
    "mends": "fixes",
    "reckoning": "legacy_state",
    "strays": "orphans",
    "told": "reported",
}
PHRASES = {  # regular expressions in lower case; a space matches any white space and a comment's start
    r"being told": "notifications",
    r"told": "reported, messages",
    r"mend(s|ed|ing)?": "fix",
    r"heed(s|ed|ing)?": "follow, honor",
    r"strays?": "orphan",
    r"foresight": "prewarm",
    r"reckoning": "legacy state",
    r"inquiry": "probe",
    r"last words": "last message, log tail",
    r"(stands|stood|standing) still": "hangs, makes no progress",
    r"(stand|stands|stood) in the way": "error, reason",
    r"(is|are|be|was) to be had": "is available",
    r"(going|goes|went) again": "recovered",
    r"(broke|broken|breaks) off": "crashed, failed",
    r"(it|here it) is given": "the limit is",
    r"(take|takes|taken|took) out": "remove",
    r"begins? (again|anew)": "start over",
    r"sign of life": "progress, heartbeat",
    r"put in on purpose": "injected",
    r"sets? back to": "resume from",
    r"in words": "report, explanation",
    r"the page and the server do not fit": "this page is out of date",
    r"the door": "the entry point",
}
SPACE = r"[\s#/*]+"
PHRASE = re.compile(r"\b(?:" + "|".join(PHRASES).replace(" ", SPACE) + r")\b", re.IGNORECASE)


def replacement(found: str) -> str:
    """The replacement of a phrase that PHRASE found."""
    text = re.sub(SPACE, " ", found).lower()
    return next(new for phrase, new in PHRASES.items() if re.fullmatch(phrase, text))


def files() -> Iterator[Path]:
    """All source and text files of the project."""
    folders = [ROOT]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.name.startswith(".") or path.name in SKIPPED or path.is_symlink():
                continue
            if path.is_dir():
                folders.append(path)
            elif path.suffix in TEXT_FILES | {".py"} and path != THIS:
                yield path


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """(name, line, whether it names a function) of everything that the code names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, True
        elif isinstance(node, ast.ClassDef):
            yield node.name, node.lineno, False
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno, False
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value.lineno, False
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno, False
        elif isinstance(node, ast.Name):
            yield node.id, node.lineno, False
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[-1], node.lineno, False


def retired_names(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, name, replacement) of each retired name in Python code."""
    for name, line, is_function in identifiers(ast.parse(source)):
        bare = name.strip("_")
        if bare in NAMES:
            yield line, name, NAMES[bare]
        elif is_function and bare in FUNCTIONS:
            yield line, name, FUNCTIONS[bare]
        elif part := next((part for part in bare.split("_") if part in PARTS), None):
            yield line, name, f"{part} → {PARTS[part]}"


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each string, docstring and comment block in Python code; an f-string's values are left out."""
    inside_f_string: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inside_f_string |= {id(part) for part in node.values}
            yield node.lineno, "…".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside_f_string:
            yield node.lineno, node.value
    block, first = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            first = first if block else token.start[0]
            block += token.string + "\n"
        elif token.type != tokenize.NL and block:
            yield first, block
            block = ""


def retired_phrases(text: str, line: int = 1) -> Iterator[tuple[int, str, str]]:
    """(line, phrase, replacement) of each retired phrase in a text that starts at `line`."""
    for match in PHRASE.finditer(text):
        yield line + text.count("\n", 0, match.start()), " ".join(match[0].split()), replacement(match[0])


def problems(path: Path) -> list[str]:
    """One message for each retired name or phrase in a file; phrases in tests are not checked."""
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    found: set[tuple[int, str, str]] = set()
    if path.suffix == ".py":
        found |= set(retired_names(source))
        if path.stem in MODULES:
            found.add((1, f"module {path.stem}", MODULES[path.stem]))
        if not name.startswith("tests/"):
            for line, text in texts(source):
                found |= set(retired_phrases(text, line))
    else:
        found |= set(retired_phrases(source))
    return [f"{name}:{line}: {word!r} is retired; use: {new}" for line, word, new in sorted(found)]


def test_no_retired_name_or_phrase_is_used():
    found = [problem for path in files() for problem in problems(path)]
    assert not found, f"{len(found)} retired words:\n" + "\n".join(found)


@pytest.mark.parametrize("name", [*NAMES, *PARTS, "_told", "test_a_full_disk_is_told"])
def test_a_retired_name_is_found_wherever_it_stands(name):
    for code in (
        f"{name} = 1",
        f"def f({name}): pass",
        f"def f(): return self.{name}",
        f"f({name}=1)",
        f"from a import {name}",
    ):
        assert list(retired_names(code)), code


@pytest.mark.parametrize(
    "text, phrase",
    [
        ("What is wrong is told\nat once", "told"),
        ("nothing stands\n# in the way", "stands # in the way"),
        ("run it again once that is mended", "mended"),
        ("It broke off.", "broke off"),
        ("Take out", "Take out"),
    ],
)
def test_a_retired_phrase_is_found_with_its_replacement(text, phrase):
    ((_, found, new),) = retired_phrases(text)
    assert found == phrase and new


def test_strings_docstrings_and_comments_are_all_read():
    source = '"""Doc told."""\nx = f"a {y} told"  # told\n# stands\n# still\nz = "is to be " "had"\n'
    found = [(line, word) for start, text in texts(source) for line, word, _ in retired_phrases(text, start)]
    assert sorted(found) == [(1, "told"), (2, "told"), (2, "told"), (3, "stands # still"), (5, "is to be had")]


@pytest.mark.parametrize("text", ["placement", "recommend", "a whole number", "household", "amended", "outdoors"])
def test_standard_english_is_allowed(text):
    assert not list(retired_phrases(text)) and not list(retired_names(f"{text.replace(' ', '_')} = 1"))
