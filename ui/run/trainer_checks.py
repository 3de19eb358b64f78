"""What is said when a run continues on another version of its trainer, and the command that puts the old one back.

Whether a version is tested, and what is not guarded in it, is in the tab Doctor.
"""

import sys
from pathlib import Path

from runs.quoting import quote, quote_cmd
from sd_scripts_patches import versions
from sd_scripts_patches.trainers import TRAINERS


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
