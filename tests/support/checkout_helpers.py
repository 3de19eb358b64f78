"""A folder in place of kohya's sd-scripts, with two commits."""

import subprocess
from pathlib import Path

import pytest


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.invalid", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, subject: str) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", subject)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path) -> tuple[Path, str, str]:
    """A folder in place of sd-scripts with two commits: the one of the last run, and an update."""
    folder = tmp_path / "it's sd-scripts"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "train_network.py").write_text("old\n")
    old = commit(folder, "the first <b>one</b>")
    (folder / "train_network.py").write_text("new\n")
    return folder, old, commit(folder, "the update")
