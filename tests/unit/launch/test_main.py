"""`python -m launch`: the table of commands, usage errors, and what a command may import."""

import pytest
from runs_helpers import call, python

from launch.__main__ import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of(name):
    done = call("launch", name, "--help")
    assert done.returncode == 0 and "--json" in done.stdout


@pytest.mark.parametrize(
    "words", [(), ("nothing",), ("store",), ("runpod", "RUN"), ("runpod", "RUN", "--image=x", "--stop=no")]
)
def test_wrong_usage_is_exit_code_2(words):
    done = call("launch", *words)
    assert done.returncode == 2 and "usage: python -m launch" in done.stderr


def test_a_failure_is_exit_code_1_with_its_reason(data):
    done = call("launch", "train", "gone")
    assert done.returncode == 1 and done.stderr.startswith("launch train: ") and "gone" in done.stderr
    assert call("launch", "fleet", "--store", "ftp://x").returncode == 1, "no store answers"


def test_the_list_of_commands_imports_none_of_them():
    found = "[m for m in sys.modules if m.startswith(('launch.', 'monitor', 'runs'))]"
    said = python("-c", f"import sys, launch.__main__; print({found})").stdout.strip()
    assert said == "['runs', 'runs.files', 'launch.common', 'launch.__main__']"
