"""Start and stop a run with the monitor's commands, as separate processes, because a run must outlive the page.

They are not in the table of ui/jobs.py: the monitor's own lock excludes a second start, a stop can be repeated, and a
stop must work on a full disk.

Their output goes to a file, not to a pipe: the processes that the monitor starts inherit it and would keep a pipe open.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import runs

START_S = 60  # seconds `monitor start` may take
STOP_S = 5  # seconds the page waits for `monitor stop`, which continues without the page


def start(folder: Path) -> None:
    """Start or resume a run, detached; while its GPU is busy, or others wait for it, it goes to the end of the queue.

    Raises:
        runs.RunError: the monitor refused; carries its message.
    """
    with tempfile.TemporaryFile() as output:
        process = _command(["jobs", "queue", "start", str(folder)], output)
        try:
            code = process.wait(START_S)
        except subprocess.TimeoutExpired:
            raise runs.RunError(
                f"the monitor did not start within {START_S} s; read {folder / 'monitor.log'}, then press Start again"
            ) from None
        if code:
            raise runs.RunError(_message(output) or f"python -m jobs queue start {folder} exited with code {code}")


def stop(folder: Path) -> None:
    """Request a checkpoint and a stop. Returns after at most STOP_S seconds; the run's state shows the progress.

    Raises:
        runs.RunError: the monitor refused; carries its message.
    """
    with tempfile.TemporaryFile() as output:
        process = _command(["monitor", "stop", str(folder)], output)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return
        if code:
            raise runs.RunError(_message(output) or f"python -m monitor stop {folder} exited with code {code}")


def _command(words: list[str], output: BinaryIO) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=runs.ROOT,
        env={**os.environ, "PYTHONUTF8": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _message(output: BinaryIO) -> str:
    """The last lines of a command's output, without its prefix."""
    output.seek(0)
    lines = output.read().decode("utf-8", "replace").strip().splitlines()
    return "\n".join(line.removeprefix("monitor: ").removeprefix("jobs: ") for line in lines[-8:])
