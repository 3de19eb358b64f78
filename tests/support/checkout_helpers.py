"""A folder in place of kohya's sd-scripts, with two commits, and runs that trained with one of them."""

import json
import subprocess
from pathlib import Path

import pytest
from ui_helpers import write_run

from sd_scripts_patches import versions


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


def used(data: Path, folder: Path, old: str, **run) -> Path:
    """A run that trained with a commit of the checkout."""
    made = write_run(data, state="completed", **run)
    note = {"trainer": "sd-scripts", "checkout": str(folder), "commits": [old]}
    (made / versions.FILE).write_text(json.dumps(note))
    return made
