"""Start and stop a run with the monitor's commands, as separate processes, because a run must outlive the page.

They are not in the table of ui/jobs.py: the monitor's own lock excludes a second start, a stop can be repeated, and a
stop must work on a full disk.

Their output goes to a file, not to a pipe: the processes that the monitor starts inherit it and would keep a pipe open.
`changed` says that a run continues on another version of its trainer. Whether a version is tested is in the tab Doctor.
"""

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import runs
from monitor.process.spawned import helper, python
from runs.quoting import quote, quote_cmd
from sd_scripts_patches import versions
from sd_scripts_patches.trainers import TRAINERS

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


def changed(run: Path) -> list[str]:
    """What is said when a run continues on another version than the one it used so far; [] when it does not."""
    noted = versions.used(run)
    trainer = TRAINERS.get(noted.trainer) if noted else None
    now = versions.commit(trainer.checkout) if trainer else ""
    if noted is None or trainer is None or not noted.commits or not now or noted.commits[-1] == now:
        return []
    return [
        f"This run used commit {noted.commits[-1][:8]} of {trainer.name} so far and continues on {now[:8]}. The tab Doctor says what "
        f"fits it. To go back, stop the run, then run in the Hangproof folder: {command_back(trainer.key, noted.commits[-1])}"
    ]


def command_back(key: str, commit: str, platform: str = sys.platform) -> str:
    """The command that puts the old version and its requirements back. It refuses where a file was changed by hand."""
    quoted, start = (quote_cmd, r".\start.bat") if platform == "win32" else (quote, "./start.sh")
    return f"{quoted(sys.executable)} -m sd_scripts_patches.versions {key} {commit} && {start} {key}"
