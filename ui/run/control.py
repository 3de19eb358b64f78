"""Start and stop a run as the monitor's commands do; a run outlives the page, because its monitor is a session of its own.

`changed` says that a run continues on another version of its trainer. Whether a version is tested is in the tab Doctor.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from monitor.run_folder import MonitorError
from runs.files import RunError
from runs.quoting import quote, quote_cmd
from sd_scripts_patches import versions
from sd_scripts_patches.trainers import TRAINERS

_asked: set[tuple[Path, str]] = set()


def ask_once(folder: Path, *questions: str) -> str:
    """Why the run or draft in `folder` is not started unasked, the first time; "" from then on, and without a question:
    whoever starts again after the question means it. Another server asks again."""
    text = "".join(f"{one.rstrip('.')}. " for one in questions if one)
    if not text or (folder, text) in _asked:
        return ""
    _asked.add((folder, text))
    return f"{text}Press the button again to start anyway."


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """A refusal of the monitor or the disk as RunError."""
    try:
        yield
    except MonitorError as error:
        raise RunError(str(error)) from error
    except OSError as error:
        raise RunError(f"This cannot be written: {error.strerror or error}. Free some space, then try again") from error


def start(folder: Path) -> None:
    """Start or resume a run, detached; while its GPU is busy, or others wait for it, it goes to the end of the queue.

    Raises:
        RunError: the monitor refused; carries its message.
    """
    from jobs import worker
    from monitor.cli import commands

    with refusals():
        worker.start_or_wait(commands.find(str(folder)))


def stop(folder: Path) -> None:
    """Request a checkpoint and a stop; the run's state shows the progress.

    Raises:
        RunError: the monitor refused; carries its message.
    """
    from monitor.cli import commands

    with refusals():
        commands.ask_to_end(commands.find(str(folder)), {"now": False})


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
