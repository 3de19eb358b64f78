"""The queue above the list of runs: what waits for the GPU, in which order, and when it will start; and the sweeps.

The order is in jobs/queue.py; the page shows it and changes it. It also starts the queue's process when that is
missing, so an open page is one more that keeps the queue going.
"""

import contextlib
import time

import runs
from jobs import queue
from monitor.run_folder import MonitorError
from monitor.state import FINAL, load_learned
from runs import sweep
from runs.files import RunError
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
    """The queue and the newest sweeps; "" where there is neither."""
    views = {one.folder.name: one for one in everything}
    waiting = [one for one in entries() if one.next_run in views]  # a deleted run leaves at the queue's next turn
    _keep_going()
    shown, starts_s = [], _free_s(everything)
    for entry in waiting:
        first = views[entry.next_run]
        shown.append((entry, entry.run if entry.sweep else first.name, _about(entry, first, starts_s)))
        for name in [] if entry.problem else entry.sweep or (entry.run,):
            length_s = _left_s(views[name]) if name in views else 0.0
            starts_s = None if starts_s is None or length_s is None else starts_s + length_s
    sweeps = [_sweep(one, views) for one in sweep.all_sweeps()[:SWEEPS]]
    return part("run/queue.html", "queue", shown, sweeps) if shown or sweeps else ""


def _keep_going() -> None:
    """Start the queue's process where something waits and it is missing."""
    global _checked_s
    if entries() and time.monotonic() - _checked_s >= CHECK_S:
        _checked_s = time.monotonic()
        queue.ensure_worker()


def _about(entry: queue.Entry, shown: view.View, starts_s: float | None) -> list[str]:
    """What is said of an entry. shown: its run, or the next one of its sweep. starts_s: until that starts, None while unknown."""
    if entry.problem:
        return [entry.problem]
    about = [f"{entry.total - len(entry.sweep)} of {entry.total} started"] if entry.sweep else []
    about += ["paused"] * (shown.state == "paused")
    if starts_s is not None:
        rounded_s = round(starts_s / 15) * 15
        about.append(f"starts in about {duration(rounded_s)}" if rounded_s else "starts next")
    return about


def _sweep(one: sweep.Sweep, views: dict[str, view.View]) -> tuple[sweep.Sweep, int, bool]:
    """A sweep, how many of its runs have ended, and whether others have not."""
    shown = [views[run] for run, _ in one.runs if run in views]
    waits = any(entry.run == one.name for entry in entries())
    return one, sum(each.state in FINAL for each in shown), waits or any(each.running for each in shown)


def _free_s(everything: list[view.View]) -> float | None:
    """Seconds until the runs under way end, None while unknown."""
    left = [one.number("eta_s") for one in everything if one.running]
    known = [seconds for seconds in left if seconds is not None]
    return max(known, default=0.0) if len(known) == len(left) else None


def _left_s(shown: view.View) -> float | None:
    """Seconds that a run takes from here on: by its own steps, else by those of earlier runs like it; None while unknown."""
    step, planned, step_s = (shown.number(key) for key in ("step", "planned_steps", "step_s"))
    if planned and step_s:
        return max(0.0, planned - (step or 0)) * step_s
    spec = shown.folder / "run.toml"
    return kept("length", spec, [spec], lambda: _estimate(shown))


def _estimate(shown: view.View) -> float | None:
    from runs.dataset import counts

    durations = load_learned(shown.folder, shown.spec)
    step_s = durations.get("step", {}).get("median")
    try:
        planned = runs.planned_steps(runs.load(shown.folder), counts(runs.datasets_dir() / shown.folder.name))
    except (RunError, OSError):
        return None
    return planned * step_s if step_s else None


def follow_delete(run: str) -> None:
    """A run is deleted: it leaves the queue. One that stays there is not started, because its folder is gone."""
    with contextlib.suppress(MonitorError, OSError):
        queue.forget(run)


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
