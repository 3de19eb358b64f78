"""README.md, CONTRIBUTING.md and docs/ name only what exists: paths, commands and flags.

Inline code and code blocks are checked. Words in capitals (RUN, NAME) are placeholders.
"""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

import hangproof
from benchmarks import faults
from monitor import config, state
from runs.paths import ROOT

DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
SUFFIXES = (".py", ".toml", ".sh", ".bat", ".md", ".txt", ".json", ".jsonl", ".log", ".ini", ".cfg")
# Files and folders of a run, of a user or of a machine, which a checkout does not have.
NOT_HERE = re.compile(
    r"""(outputs|datasets|models|sample|incidents|sd-scripts|\.venv)(/.*)?|[~/%].*|.*/path/to/.*|
        (run|my|notify|dataset)\.toml|train\.sh|report\.md|(training|monitor)\.log|
        (status|incident|monitor|job)\.json|(events|metrics|votes)\.jsonl""",
    re.VERBOSE,
)


def code(text: str) -> list[str]:
    """All inline code and each line of the code blocks, with the pipes of tables unescaped."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    lines = [line.partition(" #")[0] for block in blocks for line in block.splitlines()]
    return [span.replace(r"\|", "|") for span in (*inline, *lines)]


def paths(text: str) -> set[str]:
    """The words in code that name a path of the project; test_documentation.py checks the links."""
    words = {word for span in code(text) for word in re.split(r"[\s,()=\"']+", span)}
    words = {word.removeprefix("./") for word in words if not re.search(r"[$<>@|:…]", word)}
    words = {word for word in words if not re.search(r"(?<![^/])(?!README|CONTRIBUTING)[A-Z_]+(?![^/.])", word)}
    named = {word for word in words if "/" in word.strip("/") or word.endswith(("/", *SUFFIXES))}
    return {word for word in named if not NOT_HERE.fullmatch(word)}


def commands(text: str) -> set[tuple[str, str, str]]:
    """(module, subcommand or "", the rest) of each `python -m …`; `a|b` names two subcommands."""
    found = set()
    for span in code(text):
        for module, words in re.findall(r"python -m ([\w.]+)((?: [^\s].*)?)$", span):
            first, _, rest = words.strip().partition(" ")
            if not re.fullmatch(r"[a-z][a-z_|-]*", first):
                first, rest = "", words
            found |= {(module, name, rest) for name in first.split("|")}
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_exists(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    found = paths(text)
    missing = sorted(path for path in found if not any(ROOT.glob(path.rstrip("/"))))
    assert not missing, f"{document} names paths that do not exist: {missing}"


# One process prints the help of every command: each of its own would import most of the project again.
HELP = """
import contextlib, json, runpy, sys, tempfile
texts, path = [], sys.path[:]
for words in json.load(sys.stdin):
    sys.path[:] = path
    sys.argv, out = [*words, "--help"], tempfile.TemporaryFile("w+")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    out.seek(0)
    texts.append(out.read())
print(json.dumps(texts))
"""


@pytest.fixture(scope="module")
def help_of() -> dict[tuple[str, ...], str]:
    found = set().union(*(commands((ROOT / document).read_text(encoding="utf-8")) for document in DOCUMENTS))
    known = [(module, name) for module, name, _ in found if module != "pytest" and importlib.util.find_spec(module)]
    words = sorted({(module,) for module, _ in known} | {(module, name) for module, name in known if name})
    command = [sys.executable, "-c", HELP]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(words), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(words, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_and_its_flags_exist(document, help_of):
    found = commands((ROOT / document).read_text(encoding="utf-8"))
    problems = []
    for module, subcommand, rest in sorted(found):
        if importlib.util.find_spec(module) is None:
            problems.append(f"python -m {module}: no such module")
        elif module != "pytest":
            text = help_of[module,]
            if subcommand and not re.search(rf"(?<![\w-]){re.escape(subcommand)}(?![\w-])", text):
                problems.append(f"python -m {module} {subcommand}: no such subcommand")
            text += help_of[module, subcommand] if subcommand else ""
            problems += [
                f"python -m {module} {subcommand} {flag}: no such flag"
                for flag in set(re.findall(r"(?<!\S)--[\w-]+", rest)) - {"--help"}
                if not re.search(re.escape(flag) + r"(?![\w-])", text)
            ]
    assert not problems, f"{document}: {problems}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_of_start_sh_exists(document):
    named = {word for span in code((ROOT / document).read_text(encoding="utf-8"))
             for word in re.findall(r"\./start\.sh ([a-z][a-z-]*)", span)}  # fmt: skip
    assert sorted(word for word in named if hangproof.arguments(word) is None) == []


def test_the_limits_shown_can_be_loaded(tmp_path):
    text = (ROOT / "docs/limits.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```\n(\[phases\..*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "my.toml").write_text(block, encoding="utf-8")
    assert config.load(tmp_path / "my.toml", {}) != config.load(environ={})


def test_the_numbers_are_those_of_the_code():
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS)
    seconds = config.load(environ={}).end.preempt_total_s
    assert f"exits within {seconds:.0f} s with code {state.EXIT_PREEMPTED}" in text
    assert f"RestartForceExitStatus={state.EXIT_PREEMPTED}\n" in text
    assert f"SuccessExitStatus={state.EXIT_STOPPED} {state.EXIT_PREEMPTED}\n" in text
    assert f"RestartPreventExitStatus={state.EXIT_FAILED} {state.EXIT_BUDGET}\n" in text
    assert f": {len(faults.table())} rows" in text
