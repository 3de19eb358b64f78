"""The queue above the list of runs: what waits for the GPU, in which order; and the sweeps.

The order is in jobs/queue.py; the page shows it and changes it. It also starts the queue's process when that is
missing, so an open page is one more that keeps the queue going.
"""

import time

from jobs import queue
from monitor.state import FINAL
from runs import sweep
from ui.html import duration, esc, number, part, table
from ui.run import view
from ui.run.readers import kept

CHECK_S = 10.0  # between two looks whether the queue's process is there
SWEEPS = 4  # shown below the queue
_checked_s = -1e9


def entries() -> list[queue.Entry]:
    """The entries of the queue; the file is read again only after it changed."""
    file = queue.outputs() / queue.FILE
    return kept("queue", file, [file], queue.read).entries


def html(everything: list[view.View]) -> str:
    """The queue and the newest sweeps; "" where there is neither. Starts the queue's process where it is missing."""
    global _checked_s
    known = entries()
    if known and time.monotonic() - _checked_s >= CHECK_S:
        _checked_s = time.monotonic()
        queue.ensure_worker()
    views = {one.folder.name: one for one in everything}
    waiting = [one for one in known if one.next_run in views]  # a deleted run leaves at the queue's next turn
    shown = [(one, one.run if one.sweep else views[one.run].name, _about(one, views[one.next_run])) for one in waiting]
    sweeps = []
    for one in sweep.all_sweeps()[:SWEEPS]:
        runs = [views[run] for run, _ in one.runs if run in views]
        goes_on = one.name in {entry.run for entry in known} or any(each.running for each in runs)
        sweeps.append((one, sum(each.state in FINAL for each in runs), goes_on))
    return part("run/queue.html", "queue", shown, sweeps) if shown or sweeps else ""


def _about(entry: queue.Entry, shown: view.View) -> list[str]:
    """What is said of an entry. shown: its run, or the next one of its sweep."""
    if entry.problem:
        return [entry.problem]
    started = [f"{entry.total - len(entry.sweep)} of {entry.total} started"] if entry.sweep else []
    return started + ["paused"] * (shown.state == "paused")


LOSSES = {"final_loss": "Final loss", "best_loss": "Best loss", "val_loss": "Validation"}


def table_of(name: str) -> str:
    """The runs of a sweep with what came out of each, as markup. RunError: there is no such sweep."""
    found = sweep.find(name)
    rows = sweep.table(found)
    lowest = {key: min(known) for key in LOSSES if (known := [row[key] for row in rows if row[key] is not None])}
    titles = [field[:1].upper() + field[1:].replace("_", " ") for field in found.fields]
    cells = []
    for row in rows:
        values = [row["values"][field] for field in found.fields]
        losses = [number(row[key]) + " (lowest)" * (row[key] == low) for key, low in lowest.items()]
        cells.append([row["run"], *values, row["state"], row["steps"], *losses, duration(row["seconds"])])
    heads = ["Run", *titles, "State", "Steps", *(LOSSES[key] for key in lowest), "Time"]
    return (
        f"<h3>{esc(name)}</h3>"
        '<p class="hp-say">Losses are means of up to 50 steps: the last ones, and those with the lowest mean.</p>'
        + table(f"Runs of {name}", heads, cells)
    )
