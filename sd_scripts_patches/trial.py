"""Trainings that are run to learn something, not to keep: bounded, in a temporary folder, with nothing left behind.

The self-test uses it. Each process has its own group, so that it is killed together with its workers, also
when the user presses Ctrl-C or the terminal is closed. HF_HOME and TMPDIR point into
the folder, and Python writes no caches.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guards import socket_folder
from sd_scripts_patches.tiny import ROOT, Installation, python_of

POLL_S = 0.05


@dataclass
class Job:
    """A process, its log file, and what is known once it has ended.

    code: exit code, negative for a signal, None while it runs and when it was killed at its limit.
    """

    process: subprocess.Popen[bytes]
    log_file: Path
    started_s: float
    code: int | None = None
    took_s: float = 0.0

    @property
    def log(self) -> str:
        """Both output streams."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def error(self) -> str:
        """Return the last line of the log that names an error, else its last line."""
        lines = [line.strip() for line in re.split(r"[\r\n]+", self.log) if line.strip()]
        named = [line for line in lines if re.match(r"([\w.]+(Error|Exception|Interrupt|Exit)\b|hangproof: )", line)]
        return (named or lines or ["it printed nothing"])[-1][:300]

    def outcome(self) -> str:
        """Return how it ended."""
        if self.code is None:
            return f"did not end within {self.took_s:.0f} s"
        if self.code < 0:
            return f"was killed by signal {-self.code}"
        return f"exited with code {self.code}"


@dataclass
class Trial:
    """A temporary folder and the processes started in it. Use it as a context manager."""

    folder: Path = field(init=False)
    jobs: list[Job] = field(default_factory=list)
    _handlers: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Trial:
        for name in ("SIGTERM", "SIGHUP"):  # as Ctrl-C: clean up, then exit
            if hasattr(signal, name):
                number = getattr(signal, name)
                self._handlers[number] = signal.signal(number, lambda got, _: sys.exit(128 + got))
        self._handlers[signal.SIGINT] = signal.getsignal(signal.SIGINT)
        self.folder = Path(tempfile.mkdtemp(prefix="hp-")).resolve()
        (self.folder / "t").mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._handlers:  # an impatient second Ctrl-C leaves nothing behind either
            signal.signal(number, signal.SIG_IGN)
        for job in self.jobs:
            kill(job)
        shutil.rmtree(self.folder, ignore_errors=True)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def environment(self, install: Installation, work: Path, **extra: str) -> dict[str, str]:
        """Return the variables of a training on the tiny models that writes nowhere but to this folder."""
        private = {
            "HF_HOME": str(self.folder / "hf"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "ACCELERATE_USE_CPU": "true",
            "PYTHONUNBUFFERED": "1",
        }
        temporary = str(self.folder / "t")
        if socket_folder.fits(temporary):
            private["TMPDIR"] = temporary
        without = os.environ.get("HANGPROOF_WITHOUT")  # --hangproof_without= of this command
        return install.environment(work, **private, **({"HANGPROOF_WITHOUT": without} if without else {}), **extra)

    def start(self, command: list[str], environment: Mapping[str, str], cwd: Path, name: str) -> Job:
        """Start a process in a group of its own; its output goes to NAME.log."""
        path = self.folder / f"{name}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=os.name != "nt",
            )
        self.jobs.append(Job(process, path, time.monotonic()))
        return self.jobs[-1]

    def wait(self, job: Job, limit_s: float) -> Job:
        """Wait for a process; kill it with its workers after `limit_s` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.code = job.process.wait(limit_s)
        job.took_s = time.monotonic() - job.started_s
        if job.code is None:
            kill(job)
        return job


def kill(job: Job) -> None:
    """Kill what is left of a process and of its workers."""
    if os.name == "nt":
        if job.process.poll() is None:
            subprocess.run(
                ["taskkill", "/T", "/F", "/PID", str(job.process.pid)], capture_output=True, timeout=60, check=False
            )
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
            os.killpg(job.process.pid, signal.SIGKILL)
    if job.process.returncode is None:
        job.process.wait(60)


def is_alive(pid: int) -> bool:
    """Return True while a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] != "Z"
        )
    except (OSError, IndexError):  # no /proc, or gone in between
        return Path("/proc").is_dir() is False


def installation(text: str) -> Installation:
    """Return what `CHECKOUT` or `CHECKOUT@VENV` names. Raises argparse.ArgumentTypeError, which says what is missing.

    Without a VENV: $SD_SCRIPTS_VENV or $MUSUBI_VENV, else the interpreter that runs this; from our own environment the
    one that ./start.sh makes for the trainer.
    """
    folder, at, venv = text.rpartition("@")
    if not at or Path(text).is_dir():
        folder, venv = text, ""
    trainer = Installation(Path(folder).resolve(), Path(sys.executable)).trainer
    venv = venv or os.environ.get(trainer.venv_variable, "")
    if not venv and Path(sys.prefix).resolve() == (ROOT / ".venv").resolve():
        venv = str(ROOT / trainer.venv)
    python = python_of(Path(venv).absolute()) if venv else Path(sys.executable)
    found = Installation(Path(folder).resolve(), python)
    if found.why_not():
        raise argparse.ArgumentTypeError(
            f"{found.why_not()}. Name another, or install it with ./start.sh {trainer.key}"
        )
    return found
