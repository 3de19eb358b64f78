"""Which version of a trainer a run began on, which one its checkout holds now, and the command for the way back.

A run's folder remembers the commits it ran on (`trainer.json`), so that an update between two attempts is seen and
said. A commit is read from git's own files: the trainer's environment may have no git, and another user's folder is
refused by it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from guards import shell
from guards.checkpoint import atomic_write
from guards.reading import commit, number
from sd_scripts_patches import compatibility
from sd_scripts_patches.trainers import TRAINERS, Trainer

FILE = "trainer.json"


def used(run: Path, trainer: str) -> list[str]:
    """Return the commits of a trainer that a run's folder remembers, each once in a row, the latest last."""
    try:
        content = json.loads((run / FILE).read_text(encoding="utf-8"))
        return [str(one) for one in content["commits"]] if content["trainer"] == trainer else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def record(run: Path, trainer: Trainer, checkout: Path) -> str:
    """Note in a run's folder which commit it runs on. Returns a line for the log when that is not the one before."""
    now, before = commit(checkout), used(run, trainer.key)
    if not now or before[-1:] == [now]:
        return ""
    content = {"trainer": trainer.key, "checkout": str(checkout), "commits": [*before, now]}
    atomic_write(run / FILE, json.dumps(content))
    if not before:
        return ""
    folder = shell.word(checkout)
    return (
        f"this run began on {trainer.name} {before[0][:8]}, its last attempt used {before[-1][:8]}, and it continues on "
        f"{now[:8]}. To go back: git -C {folder} checkout {before[-1]}. To see which guards fit it: "
        f"python -m sd_scripts_patches check {folder}"
    )


def on_start(found: compatibility.Checkout) -> str:
    """Note the commit of this training in its run's folder. Returns a line for the log, or ""."""
    run = os.environ.get("HANGPROOF_RUN", "")
    if not run or number("RANK", 0):
        return ""
    trainer = next(one for one in TRAINERS.values() if one.name == found.trainer)
    root = next((folder for folder in (found.source, found.source.parent) if (folder / ".git").exists()), found.source)
    try:
        return record(Path(run), trainer, root)
    except OSError as error:  # the training itself says what is wrong with its folder
        return f"the version of {trainer.name} could not be noted in {run}: {error}"
