"""The word in front of every command, and start.bat, as Windows runs them."""

import os
import shutil
import signal
import subprocess

import hangproof
from runs import paths


def test_on_windows_ctrl_c_is_answered_by_the_command_alone(monkeypatch):
    before, to_both = signal.getsignal(signal.SIGINT), lambda line, env: signal.raise_signal(signal.SIGINT) or 130
    monkeypatch.setattr(hangproof.subprocess, "call", to_both)
    with monkeypatch.context() as windows:
        windows.setattr(os, "name", "nt")
        assert hangproof.main(["status", "--watch"]) == 130
    signal.signal(signal.SIGINT, before)


def test_git_for_windows_keeps_the_ends_of_lines_that_bash_and_cmd_read():
    """A checkout there is what WSL and `docker build` read too."""
    assert (hangproof.ROOT / ".gitattributes").read_text().splitlines()[-1] == "* -text"
    assert b"\r" not in (hangproof.ROOT / paths.START).read_bytes()


def test_in_git_bash_or_wsl_start_sh_leaves_the_environment_of_windows_alone(tmp_path):
    """It would create it again, empty. Here it is called through a link to it."""
    for name in ("start.sh", "setup.sh", "requirements.txt"):
        shutil.copy(hangproof.ROOT / name, tmp_path)
    (tmp_path / ".venv/Scripts").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (link := tmp_path / "bin/hangproof").symlink_to(tmp_path / "start.sh")
    done = subprocess.run(["bash", str(link), "status"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "run start.bat" in done.stderr and (tmp_path / ".venv/Scripts").is_dir()
