"""Folders in place of kohya's sd-scripts: one with two commits, one with a parser."""

import subprocess
from pathlib import Path

import pytest

PARSER = """
import argparse

def setup_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ae", type=str, help="path")
    parser.add_argument("--output_dir", type=str)
    parser.add_argument("--network_dim", type=int)
    parser.add_argument("--split_mode", action="store_true")
    parser.add_argument("--optimizer_type", type=str)
    parser.add_argument("--guidance_scale", type=float, default=3.5)
    parser.add_argument("--log_level", choices=["DEBUG", "INFO"], help="Set it / ログ")
    parser.add_argument("--noise_offset", type=float, help="<img src=x onerror='document.title=1'> {{7*7}} ${7*7}")
    parser.add_argument("--betas", type=float, nargs="*")
    return parser
"""


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


def parser_checkout(folder: Path) -> Path:
    """Write it. Returns the folder."""
    folder.mkdir()
    (folder / "flux_train_network.py").write_text(PARSER, encoding="utf-8")
    return folder
