"""Start and stop a run: by the monitor's own commands, as processes, because a run must outlive the page.

Their output goes to a file and never to a pipe: what the monitor starts inherits it and would hold a pipe open.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import runs

START_S = 60  # seconds `monitor start` may take until the run is on its way
STOP_S = 5  # seconds the page waits for `monitor stop`; it goes on without us


def start(folder: Path) -> None:
    """Start or resume a run, detached.

    Raises:
        runs.RunError: the monitor's own words on why not.
    """
    with tempfile.TemporaryFile() as said:
        process = _monitor(["start", str(folder)], said)
        try:
            code = process.wait(START_S)
        except subprocess.TimeoutExpired:
            raise runs.RunError(
                f"the monitor has not started within {START_S} s; look into {folder / 'monitor.log'}, then press Start again"
            ) from None
        if code:
            raise runs.RunError(_words(said) or f"python -m monitor start {folder} ended with code {code}")


def stop(folder: Path) -> None:
    """Ask a run to save a checkpoint and stop. Returns at once; the run's state tells how far it is.

    Raises:
        runs.RunError: the monitor's own words on why not.
    """
    with tempfile.TemporaryFile() as said:
        process = _monitor(["stop", str(folder)], said)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return
        if code:
            raise runs.RunError(_words(said) or f"python -m monitor stop {folder} ended with code {code}")


def _monitor(arguments: list[str], output) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "monitor", *arguments],
        cwd=runs.ROOT,
        env={**os.environ, "PYTHONUTF8": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _words(said) -> str:
    said.seek(0)
    lines = said.read().decode("utf-8", "replace").strip().splitlines()
    return "\n".join(line.removeprefix("monitor: ") for line in lines[-8:])
