"""`status --watch`: the runs as a table that keeps itself up to date, until Ctrl-C or until all have ended."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path

from monitor import status as statuses
from monitor.folder import FINAL
from monitor.report import PHASES, duration

EVERY_S = 1.0
COLOURS = {
    "running": "green",
    "completed": "green",
    "suspect": "yellow",
    "slow": "yellow",
    "recovering": "yellow",
    "backoff": "yellow",
    "stopping": "yellow",
    "failed": "red",
    "unkillable": "red",
}


def table(folders: list[Path], now: float):
    """One row a run; `now` is Unix time."""
    from rich.table import Table

    made = Table("run", "state", "step", "epoch", "loss", "s/step", "to go", "last sign", "restarts", "", expand=True)
    for folder in folders:
        values = statuses.read(folder)
        if values is None:
            made.add_row(folder.name, "[dim]not started[/]")
            continue
        state = values["state"] if values["alive"] or values["state"] in FINAL else "left alone"
        moved = values.get("last_progress_at")
        ago = now - datetime.fromisoformat(moved.replace("Z", "+00:00")).timestamp() if moved else None
        made.add_row(
            folder.name,
            f"[{COLOURS.get(state, 'white')}]{state}[/]" + (f" {PHASES[values['phase']]}" if values["phase"] else ""),
            f"{values['step']}/{values['planned_steps'] or '?'}",
            str(values["epoch"] or ""),
            f"{values['loss']:.4f}" if values["loss"] is not None else "",
            f"{values['step_s']:.2f}" if values["step_s"] else "",
            duration(values["eta_s"]) if values["eta_s"] else "",
            duration(max(0.0, ago)) if ago is not None and state not in FINAL else "",
            str(values["restarts"]),
            values["message"],
        )
    return made


def watch(folders: list[Path], every_s: float = EVERY_S) -> int:
    """Show the table until every run has ended; Ctrl-C leaves the runs alone."""
    from rich.live import Live

    def now() -> float:
        return datetime.now(timezone.utc).timestamp()

    with Live(table(folders, now()), refresh_per_second=4) as live:
        while any((s := statuses.read(f)) is not None and s["alive"] for f in folders):
            time.sleep(every_s)
            live.update(table(folders, now()))
        live.update(table(folders, now()))
    return 0
