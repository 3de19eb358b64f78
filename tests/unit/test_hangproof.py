"""The word in front of every command, and start.bat, as Windows runs them."""

import os
import shutil
import signal
import subprocess

import pytest

import hangproof
from runs import paths


def test_on_windows_ctrl_c_is_answered_by_the_command_alone_and_the_usage_names_start_bat(monkeypatch, capsys):
    before, to_both = signal.getsignal(signal.SIGINT), lambda line, env: signal.raise_signal(signal.SIGINT) or 130
    monkeypatch.setattr(hangproof.subprocess, "call", to_both)
    with monkeypatch.context() as windows:
        windows.setattr(os, "name", "nt")
        assert hangproof.main(["status", "--watch"]) == 130
        assert hangproof.main(["--help"]) == 0 and r"(or .\start.bat COMMAND" in capsys.readouterr().out
    signal.signal(signal.SIGINT, before)


def test_the_window_of_a_double_click_stays_open_after_every_error_and_of_two_starts_one_installs():
    """As text: cmd is on Windows alone."""
    start, _, end = (hangproof.ROOT / "start.bat").read_bytes().decode().partition("\r\n:failed\r\n")
    end, _, set_up = end.partition("\r\n\r\n:installed\r\n")
    assert "exit /b" not in start and start.endswith('\r\nset "code=%errorlevel%"\r\ngoto end')
    assert end.endswith('if not "%code%"=="0" if "%~1"=="" pause\r\nexit /b %code%')
    assert set_up.count("\r\n    exit /b 1\r\n") == set_up.count("if errorlevel 1") == 3
    assert start.count("call :set_up") == 2 and "if errorlevel 1 goto failed\r\n:run\r\n" in start
    assert "8>&2 2>nul ( 9>.venv.lock ( call :set_up 2>&8 ) )\r\n" in start
    assert set_up.partition(":set_up\r\n")[2].startswith('set "mine=1"\r\ncall :installed && exit /b 0\r\n')


def test_git_for_windows_keeps_the_ends_of_lines_that_bash_and_cmd_read():
    """A checkout there is what WSL and `docker build` read too."""
    assert (hangproof.ROOT / ".gitattributes").read_text().splitlines()[-1] == "* -text"
    assert b"\r" not in (hangproof.ROOT / paths.START).read_bytes()


def started(folder, start=None):
    """`start.sh status` in a folder that has only the files of the start."""
    for name in ("start.sh", "setup.sh", "requirements.txt"):
        shutil.copy(hangproof.ROOT / name, folder)
    return subprocess.run(
        ["bash", str(start or folder / "start.sh"), "status"], capture_output=True, text=True, check=False
    )


def test_in_git_bash_or_wsl_start_sh_leaves_the_environment_of_windows_alone(tmp_path):
    """It would create it again, empty. Here it is called through a link to it."""
    (tmp_path / ".venv/Scripts").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (link := tmp_path / "bin/hangproof").symlink_to(tmp_path / "start.sh")
    done = started(tmp_path, link)
    assert done.returncode == 1 and "run start.bat" in done.stderr and (tmp_path / ".venv/Scripts").is_dir()


def with_environment(folder):
    """A folder with an environment whose Python succeeds whatever it is asked; its site-packages."""
    (packages := folder / ".venv/lib/python3.11/site-packages").mkdir(parents=True)
    (folder / ".venv/bin").mkdir()
    (python := folder / ".venv/bin/python").write_text('#!/bin/sh\n[ "$1" != -V ] || echo Python 3.11.9\n')
    python.chmod(0o755)
    return packages


def test_a_package_whose_installation_was_interrupted_is_installed_again(tmp_path):
    """pip 23 writes INSTALLER after the programs; without them, it says that the package is there already."""
    packages = with_environment(tmp_path)
    for name in ("whole", "interrupted"):
        (packages / f"{name}-1.dist-info").mkdir()
    (packages / "whole-1.dist-info/INSTALLER").touch()
    assert started(tmp_path).returncode == 0
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]
    assert b'do if not exist "%%d\\INSTALLER" rmdir /s /q "%%d"\r\n' in (hangproof.ROOT / "start.bat").read_bytes()


@pytest.mark.parametrize(("code", "advice"), [(1, "run: apt install python3-venv"), (0, "then run the command again")])
def test_an_environment_that_cannot_be_created_says_why(tmp_path, monkeypatch, code, advice):
    (python := tmp_path / "python").write_text(
        f'#!/bin/sh\n[ "$2" != "import ensurepip" ] || exit {code}\n[ "$2" != venv ]'
    )
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))
    done = started(tmp_path)
    assert done.returncode == 1 and done.stderr.endswith(f"{advice}\n") and not (tmp_path / ".venv").exists()


def test_pip_s_programs_do_not_start_in_a_folder_with_a_dollar_sign(tmp_path):
    """They name their Python for a shell, between double quotes."""
    (folder := tmp_path / "a $b").mkdir()
    with_environment(folder)
    done = started(folder)
    assert done.returncode == 1 and done.stderr.endswith(f"move {folder}\n")
