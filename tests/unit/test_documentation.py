"""What a user can type or set is documented: each command, each variable, each limit; and each link leads somewhere."""

import re
import subprocess
import sys

import pytest

import hangproof
from runs.fields import reference
from runs.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
NOT_USERS = ("tests", "benchmarks", "test.sh")  # what only these read is documented where it is


def product() -> str:
    """All of the product's code."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name and name.split("/")[0] not in NOT_USERS]
    code = (".py", ".sh", ".bat", ".toml", ".yaml", "Dockerfile")
    return "\n".join((ROOT / name).read_text(encoding="utf-8") for name in names if name.endswith(code))


def test_each_environment_variable_is_documented():
    found = set(re.findall(r"\bHANGPROOF_[A-Z_]*[A-Z]\b", product()))
    assert len(found) > 30
    assert sorted(name for name in found if not re.search(rf"\b{name}\b", TEXT)) == []


@pytest.mark.parametrize("module", hangproof.COMMANDS)
def test_each_command_of_a_module_has_its_word_and_is_documented(module):
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    if module == "sd_scripts_patches":
        known = set(re.findall(rf"-m {module} ([a-z]+) ", done.stdout))
    else:
        known = set(re.findall(r"^    ([a-z][a-z-]*)(?:\s|$)", done.stdout, re.MULTILINE))
    elsewhere = known - set(hangproof.COMMANDS[module])  # `monitor queue` and `runs delete` start those of `jobs`
    assert set(hangproof.COMMANDS[module]) <= known and elsewhere <= set(hangproof.COMMANDS["jobs"])
    named = " ".join(re.findall(rf"python -m {module} [^`\n]*", TEXT)).replace("\\|", " ")
    assert sorted(word for word in known if not re.search(rf"(?<![\w-]){word}(?![\w-])", named)) == []


def test_the_settings_of_a_run_are_documented_as_they_are():
    assert (ROOT / "docs/settings.md").read_text(encoding="utf-8").endswith(f"\n\n{reference()}"), (
        "run `python -m runs fields`, and put its table there"
    )


def test_no_word_is_two_commands_and_the_readme_is_one_page():
    words = [word for names in (*hangproof.COMMANDS.values(), hangproof.OTHERS) for word in names]
    assert len(words) == len(set(words)) and all(map(hangproof.arguments, words)) and not hangproof.arguments("nothing")
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in slugs, f"{page.name}: {target}"
