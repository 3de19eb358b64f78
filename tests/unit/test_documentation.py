"""README.md, CONTRIBUTING.md and docs/ name only what exists, and all that a user can type or set.

Paths, commands and flags are those of inline code and code blocks. Words in capitals (RUN, NAME) are placeholders.
"""

import functools
import re
import subprocess

import faults
import pytest
from runs_helpers import call

import hangproof
from monitor import config, state
from runs.fields import reference
from runs.paths import ROOT

FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
TEXT = "\n".join(PAGES.values())
each_page = pytest.mark.parametrize("page", PAGES)
NOT_USERS = ("tests", "benchmarks", "test.sh")  # what only these read is documented where it is
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
    """The words in code that name a path of the project; links have a test of their own."""
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


@each_page
def test_every_path_exists(page):
    assert sorted(path for path in paths(PAGES[page]) if not any(ROOT.glob(path.rstrip("/")))) == []


@each_page
def test_each_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in slugs, target


@functools.cache
def help_of(module: str, *words: str) -> str:
    done = call(module, *words, "--help")
    return done.stdout + done.stderr


@each_page
def test_every_command_and_its_flags_exist(page):
    of_start_sh = {word for span in code(PAGES[page]) for word in re.findall(r"\./start\.sh ([a-z][a-z-]*)", span)}
    assert sorted(word for word in of_start_sh if hangproof.arguments(word) is None) == []
    for module, subcommand, rest in sorted(commands(PAGES[page])):
        if module in ("pip", "pytest"):
            continue
        text = help_of(module)
        if subcommand:
            assert re.search(rf"(?<![\w-]){re.escape(subcommand)}(?![\w-])", text), f"python -m {module} {subcommand}"
            text += help_of(module, subcommand)
        for flag in set(re.findall(r"(?<!\S)--[\w-]+", rest)) - {"--help"}:
            assert re.search(re.escape(flag) + r"(?![\w-])", text), f"python -m {module} {subcommand} {flag}"


@pytest.mark.parametrize("module", hangproof.COMMANDS)
def test_each_command_of_a_module_has_its_word_and_is_documented(module):
    pattern = rf"-m {module} ([a-z]+) " if module == "sd_scripts_patches" else r"^    ([a-z][a-z-]*)(?:\s|$)"
    known = set(re.findall(pattern, help_of(module), re.MULTILINE))
    if module != "sd_scripts_patches":  # the others explain a command in its own help, too
        second = help_of(module, hangproof.COMMANDS[module][-1]).split("\n\n")[1]
        assert not second.startswith(("options:", "positional arguments:"))
    assert set(hangproof.COMMANDS[module]) <= known
    named = " ".join(re.findall(rf"python -m {module} [^`\n]*", TEXT)).replace("\\|", " ")
    assert sorted(word for word in known if not re.search(rf"(?<![\w-]){word}(?![\w-])", named)) == []


def test_each_environment_variable_is_documented():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name and name.split("/")[0] not in NOT_USERS]
    code = [name for name in names if name.endswith((".py", ".sh", ".bat", ".toml", ".yaml", "Dockerfile"))]
    product = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in code)
    found = set(re.findall(r"\bHANGPROOF_[A-Z_]*[A-Z]\b", product))
    assert len(found) > 30 and not re.search(r"(?<!bin/)\bhf auth", product), "hf is a command of .venv alone"
    assert sorted(name for name in found if not re.search(rf"\b{name}\b", TEXT)) == []


def test_the_settings_of_a_run_are_documented_as_they_are():
    assert PAGES["docs/settings.md"].endswith(f"\n\n{reference()}"), "put the table of `python -m runs fields` there"


def test_the_limits_shown_can_be_loaded(tmp_path):
    (block,) = re.findall(r"^```\n(\[phases\..*?)^```", PAGES["docs/limits.md"], re.MULTILINE | re.DOTALL)
    (tmp_path / "my.toml").write_text(block, encoding="utf-8")
    assert config.load(tmp_path / "my.toml", {}) != config.load(environ={})


def test_the_numbers_are_those_of_the_code():
    seconds = config.load(environ={}).end.preempt_total_s
    assert f"exits within {seconds:.0f} s with code {state.EXIT_PREEMPTED}" in TEXT
    assert f"RestartForceExitStatus={state.EXIT_PREEMPTED}\n" in TEXT
    assert f"SuccessExitStatus={state.EXIT_STOPPED} {state.EXIT_PREEMPTED}\n" in TEXT
    assert f"RestartPreventExitStatus={state.EXIT_FAILED} {state.EXIT_BUDGET}\n" in TEXT
    assert f": {len(faults.table())} rows" in TEXT
