"""Python code in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(**variables: object) -> dict[str, str]:
    """The environment of a process that finds the project, with these variables."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **{name: str(value) for name, value in variables.items()}}


def run(code: str, *arguments: object, **variables: object) -> subprocess.CompletedProcess[str]:
    """`python -c CODE ARGUMENTS` in the project's folder, to its end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    env = environment(**variables)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)


def start(code: str, *arguments: object, **variables: object) -> subprocess.Popen[str]:
    """The same, started; its standard output is a pipe."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=environment(**variables), stdout=subprocess.PIPE, text=True)
