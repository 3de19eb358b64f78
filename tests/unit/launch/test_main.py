"""`python -m launch`: the table of commands, usage errors, and what a command may import."""

import subprocess
import sys

import pytest

from launch.__main__ import COMMANDS
from runs.paths import ROOT


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_help_lists_every_command():
    done = launch("--help")
    assert done.returncode == 0
    for name, (_, text) in COMMANDS.items():
        assert name in done.stdout and text.split()[0] in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of(name):
    done = launch(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


@pytest.mark.parametrize("words", [(), ("nothing",)])
def test_wrong_usage_is_exit_code_2(words):
    done = launch(*words)
    assert done.returncode == 2 and "usage: python -m launch" in done.stderr


def test_the_list_of_commands_imports_none_of_them():
    code = (
        "import sys, launch.__main__; print([m for m in sys.modules if m.startswith(('launch.', 'monitor', 'runs'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['launch.__main__']", done.stdout + done.stderr
