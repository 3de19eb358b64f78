"""What a run is doing, read from its files alone: for the page, the command line and the metrics server."""

from __future__ import annotations

from pathlib import Path

from monitor.folder import FINAL, STATUS, read_json
from monitor.locks import LOCK, is_held


def read(folder: str | Path) -> dict | None:
    """`status.json` of a run with one key more, "alive": is a monitor watching it now? None: it was never started.

    A run that is in no final state and is not watched was left alone by a killed monitor or a reboot:
    `python -m monitor start RUN` (or `resume-all`) takes it up again.
    """
    folder = Path(folder)
    values = read_json(folder / STATUS)
    if values is None:
        return None
    values["alive"] = is_held(folder / LOCK)
    return values


def left_alone(status: dict | None) -> bool:
    """Was this run under way when its monitor died? A pre-empted one counts: it is to be taken up again."""
    if status is None or status["alive"]:
        return False
    return status.get("state") not in FINAL or status.get("state") == "preempted"
