"""Start and stop a run with the monitor's commands, as separate processes, because a run must outlive the page.

They are not in the table of ui/jobs.py: the monitor's own lock excludes a second start, a stop can be repeated, and a
stop must work on a full disk.

Their output goes to a file, not to a pipe: the processes that the monitor starts inherit it and would keep a pipe open.
"""

import subprocess
import tempfile
import threading
from pathlib import Path

import runs
from monitor.process.spawned import helper, python

START_S = 60  # seconds `monitor start` may take
STOP_S = 5  # seconds the page waits for `monitor stop`, which continues without the page
_asked: set[tuple[Path, str]] = set()


def ask_once(folder: Path, *questions: str) -> str:
    """Why the run or draft in `folder` is not started unasked, the first time; "" from then on, and without a question:
    whoever starts again after the question means it. Another server asks again."""
    text = "".join(f"{one.rstrip('.')}. " for one in questions if one)
    if not text or (folder, text) in _asked:
        return ""
    _asked.add((folder, text))
    return f"{text}Press the button again to start anyway."


def start(folder: Path) -> None:
    """Start or resume a run, detached; while its GPU is busy, or others wait for it, it goes to the end of the queue.

    Raises:
        runs.RunError: the monitor refused; carries its message.
    """
    if not _done(["jobs", "queue", "start", str(folder)], START_S):
        raise runs.RunError(
            f"the monitor did not start within {START_S} s; read {folder / 'monitor.log'}, then press Start again"
        )


def stop(folder: Path) -> None:
    """Request a checkpoint and a stop. Returns after at most STOP_S seconds; the run's state shows the progress.

    Raises:
        runs.RunError: the monitor refused; carries its message.
    """
    _done(["monitor", "stop", str(folder)], STOP_S)


def _done(words: list[str], wait_s: float) -> bool:
    """Whether a command has ended within a time; it continues without the page. RunError: it failed, with its last lines."""
    with tempfile.TemporaryFile() as output:
        process = helper(python(*words), output)
        try:
            code = process.wait(wait_s)
        except subprocess.TimeoutExpired:
            threading.Thread(target=process.wait, daemon=True).start()  # it is no zombie when it has ended
            return False
        if code:
            output.seek(0)
            lines = output.read().decode("utf-8", "replace").strip().splitlines()[-8:]
            said = "\n".join(line.removeprefix("monitor: ").removeprefix("jobs: ") for line in lines)
            raise runs.RunError(said or f"python -m {' '.join(words)} exited with code {code}")
        return True
