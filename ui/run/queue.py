"""The queue above the list of runs: what waits for the GPU, in which order, and when it will start; and the sweeps.

The order is the monitor's (monitor/run_queue.py); the page shows it and changes it. It also starts the queue's process when that is
missing, so an open page is one more that keeps the queue going.
"""

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import runs
from monitor import run_queue
from monitor.run_folder import MonitorError
from runs import sweep
from runs.files import RunError
from ui import scripts
from ui.dataset.images import OUT_OF_DATE, file_url
from ui.run import view
from ui.run.readers import Stamp, stamp

if TYPE_CHECKING:
    import gradio as gr

CHECK_S = 10.0  # between two looks whether the queue's process is there
KEPT = 500
SWEEPS = 4  # shown below the queue
_checked_s = -1e9
_known: tuple[Stamp, run_queue.Queue] | None = None
_lengths: dict[Path, tuple[Stamp, float | None]] = {}  # run's folder -> stamp of run.toml, seconds of the whole run


def entries() -> tuple[run_queue.Entry, ...]:
    """The entries of the queue; the file is read again only after it changed."""
    global _known
    now = stamp(run_queue.outputs() / run_queue.FILE)
    if _known is None or _known[0] != now:
        _known = now, run_queue.read()
    return _known[1].entries


def value(everything: list[view.View]) -> dict[str, Any]:
    """What the script shows: {"entries": those of `waiting_runs`, "sweeps": those of `newest_sweeps`}."""
    views = {one.folder.name: one for one in everything}
    return {"entries": waiting_runs(everything, views), "sweeps": newest_sweeps(views)}


def newest_sweeps(views: dict[str, view.View]) -> list[dict[str, Any]]:
    """The newest sweeps: {"name", "base", "ended": runs that have ended, "total", "active": one waits or trains}."""
    found, waiting = [], {entry.run for entry in entries()}
    for one in sweep.all_sweeps()[:SWEEPS]:
        shown = [views[run] for run, _ in one.runs if run in views]
        active = one.name in waiting or any(each.running for each in shown)
        ended = sum(each.state in view.FINAL for each in shown)
        found.append({"name": one.name, "base": one.base, "ended": ended, "total": len(one.runs), "active": active})
    return found


def waiting_runs(everything: list[view.View], views: dict[str, view.View]) -> list[dict[str, Any]]:
    """The entries of the queue: {"run", "name", "done", "total", "paused", "problem", "starts_s"}.

    done, total: runs of a sweep that have started, and all of them; 0 for a single run. starts_s: seconds until its start,
    None while unknown.
    """
    global _checked_s
    waiting = entries()
    if waiting and time.monotonic() - _checked_s >= CHECK_S:
        _checked_s = time.monotonic()
        run_queue.ensure_worker()
    found, starts_s = [], _free_s(everything)
    for entry in waiting:
        shown = views.get(entry.next_run)
        if shown is None:
            continue  # deleted: the queue drops it at its next turn
        found.append(
            {
                "run": entry.run,
                "name": entry.run if entry.sweep else shown.name,
                "done": entry.total - len(entry.sweep) if entry.sweep else 0,
                "total": entry.total,
                "paused": shown.state == "paused",
                "problem": entry.problem,
                "starts_s": None if starts_s is None or entry.problem else round(starts_s / 15) * 15,
            }
        )
        for name in [] if entry.problem else entry.sweep or (entry.run,):
            length_s = _left_s(views[name]) if name in views else 0.0
            starts_s = None if starts_s is None or length_s is None else starts_s + length_s
    return found


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
    now = stamp(shown.folder / "run.toml")
    known = _lengths.get(shown.folder)
    if known is None or known[0] != now:
        if len(_lengths) > KEPT:
            _lengths.clear()
        known = _lengths[shown.folder] = now, _estimate(shown)
    return known[1]


def _estimate(shown: view.View) -> float | None:
    from monitor.gpu import nvml
    from monitor.state import learned_file, learned_key, load_learned
    from runs.dataset import counts

    durations = load_learned(learned_file(), learned_key(shown.spec, nvml.model()))
    step_s = durations.get("step", {}).get("median")
    try:
        planned = runs.planned_steps(runs.load(shown.folder), counts(runs.datasets_dir() / shown.folder.name))
    except (RunError, OSError):
        return None
    return planned * step_s if step_s else None


def change(action: str, run: str, to: int | None = None) -> dict[str, Any]:
    """Change the queue: move (to a position from 1), cancel, now. Returns {"paused": runs that make room for it}.

    Raises:
        RunError: the run does not wait, or the queue cannot be written.
    """
    from monitor.cli import queue_worker

    try:
        if action == "move" and isinstance(to, int) and not isinstance(to, bool):
            run_queue.move(run, to)
            run_queue.ensure_worker()
        elif action == "cancel":
            queue_worker.cancel(run)
        elif action == "now":
            return {"paused": queue_worker.run_now(run)}
        else:
            raise RunError(OUT_OF_DATE)
    except MonitorError as error:
        raise RunError(str(error)) from error
    except OSError as error:
        raise RunError(
            f"The queue cannot be written: {error.strerror or error}. Free some space, then try again"
        ) from error
    return {"paused": []}


def follow_delete(run: str) -> None:
    """A run is deleted: it leaves the queue. One that stays there is not started, because its folder is gone."""
    with contextlib.suppress(MonitorError, OSError):
        run_queue.forget(run)


def queue_action(data: dict[str, Any]) -> dict[str, Any]:
    """The script's call: {"do": move, cancel, now or table; "run"; "to"}.

    Returns:
        {"ok", "paused", and what `value` returns after it}; for a sweep's table {"ok", "fields", "rows"}.
    """
    given = data if isinstance(data, dict) else {}
    try:
        run = given.get("run")
        if not isinstance(run, str):
            raise RunError(OUT_OF_DATE)
        if given.get("do") == "table":
            found = sweep.find(run)
            rows = [{**row, "lora": _address(row["lora"])} for row in sweep.table(found)]
            return {"ok": True, "fields": found.fields, "rows": rows}
        answer = change(str(given.get("do")), run, given.get("to"))
        return {"ok": True, **answer, **value(view.read_all())}
    except RunError as error:
        return {"ok": False, "error": str(error)}


def _address(lora: str | None) -> str:
    """The address of a LoRA, for its download; "" without one."""
    return file_url(Path(lora)) if lora else ""


def build() -> "gr.HTML":
    """The queue; the value is that of `value`."""
    return scripts.component("run_queue", "run-queue", queue_action)
