"""The self-test as a command, and what they leave behind."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import tiny_musubi
import tiny_sd_scripts as tiny

from sd_scripts_patches.tiny import Installation

ROWS = ("environment", "versions", "GPU", "guards", "train", "LoRA", "hang", "resume")
MUSUBI_ROWS = (*ROWS[:4], "caches", *ROWS[4:])


def started(folder: Path, temporary: Path, *flags: str) -> subprocess.Popen:
    """The self-test of a checkout, whose temporary folder is in `temporary`."""
    trainer = Installation(folder, Path(sys.executable)).trainer
    python = tiny_musubi.python() if trainer.key == "musubi" else tiny.python()
    installed = Installation(folder, python)
    lacks = ["--without-torchvision"] if any(map(installed.lacks, installed.row.STAND_INS)) else []
    environment = {**os.environ, trainer.venv_variable: str(python.parent.parent), "TMPDIR": str(temporary)}
    return subprocess.Popen(
        [sys.executable, "-m", "sd_scripts_patches", "selftest", str(folder), *lacks, *flags],
        cwd=tiny.ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finished(folder: Path, *flags: str) -> tuple[int, dict[str, dict]]:
    """Its exit code and its checks by name. Its temporary folder has a short path, which sockets need, and stays empty."""
    with tempfile.TemporaryDirectory(prefix="hps-") as temporary:
        with started(folder, Path(temporary), "--json", *flags) as process:
            out, err = process.communicate(timeout=1000)
        assert out.count("\n") == 1, err
        result = json.loads(out)
        assert result["ok"] == (process.returncode == 0) and result["checkout"] == str(folder.resolve())
        assert left_behind(Path(temporary)) == []
    return process.returncode, {check["name"]: check for check in result["checks"]}


def left_behind(temporary: Path) -> list[str]:
    """The files in the temporary folder, and the processes that use it."""
    found = [str(path) for path in temporary.rglob("*")]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(temporary) in " ".join((*process.environ().values(), *process.cmdline())):
                found.append(f"pid {process.pid} ({process.status()})")
    return found


def statuses(checks: dict[str, dict]) -> dict[str, str]:
    return {name: check["status"] for name, check in checks.items()}
