"""Endpoints of runs: what the tab Runs shows and does."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import runs
from jobs import queue
from monitor.state import nothing_left
from runs import manage
from runs.results import Lora, Prompt, Sample
from ui import jobs
from ui.run import actions, blind_vote, charts, log_view, view
from ui.run.snapshots import Snapshot, best
from ui.served import file_url

MOST_LINES = 2000


def list_runs() -> list[dict[str, Any]]:
    """All runs, newest first: name, state, step, planned_steps, progress from 0 to 1, position in the queue from 1, or 0."""
    found = view.read_all()
    if not found and (why := view.unreadable()):
        raise runs.RunError(why)
    actions.keep_queue()
    return [*map(_row, found)]


def _row(one: view.View) -> dict[str, Any]:
    return {
        "run": one.folder.name,
        "name": one.name,
        "state": one.state,
        "step": one.number("step"),
        "planned_steps": one.number("planned_steps"),
        "progress": round(one.progress, 4),
        "position": actions.place(one.folder)[0],
        "problem": one.problem,
    }


def run_status(run: str) -> dict[str, Any]:
    """One run: its state, its settings, its LoRA files, its incidents, and what can be done with it now."""
    actions.keep_queue()
    folder = view.folder_of(run)
    shown = view.read(folder)
    return {
        **_row(shown),
        "status": shown.status,
        "settings": {key: value for key, value in shown.spec.items() if key != "environment"},
        "loras": [{**_lora(one), "final": one.final} for one in view.loras(folder)],
        "incidents": [{"number": one.number, **one.fields} for one in view.incidents(folder)],
        "actions": actions.possible(shown),
    }


def start_run(run: str) -> dict[str, Any]:
    """Start a run, or continue it from its last checkpoint. While the GPU is busy, it waits in the queue."""
    return _started(view.folder_of(run))


def _started(folder: Path) -> dict[str, Any]:
    if done := nothing_left(folder):
        raise runs.RunError(f"{folder.name} is {done}")
    actions.start(folder)
    return _row(view.read(folder))


def stop_run(run: str) -> dict[str, Any]:
    """Save a checkpoint and stop; a run that waits leaves the queue."""
    folder = view.folder_of(run)
    if "cancel" in actions.possible(view.read(folder)):
        actions.act(run, "cancel")
    else:
        actions.stop(folder)
    return _row(view.read(folder))


def pause_run(run: str) -> dict[str, Any]:
    """Save a checkpoint and free the GPU; `start_run` continues exactly there."""
    return actions.act(run, "pause")


def sample_now(run: str) -> dict[str, Any]:
    """Draw the sample images after the current step. The training is not changed by it."""
    return actions.act(run, "sample")


def save_now(run: str) -> dict[str, Any]:
    """Save a checkpoint after the current step."""
    return actions.act(run, "save")


def train_longer(run: str, total: int) -> dict[str, Any]:
    """Continue a completed run to `total` epochs, or to `total` steps where the run is counted in steps."""
    folder = view.folder_of(run)
    if view.read(folder).running:
        raise runs.RunError(f"{run} is under way. Wait until it is completed, or stop it first.")
    runs.train_longer(folder, total)
    return _started(folder)


def delete_run(run: str, images: bool = False) -> dict[str, Any]:
    """Delete a run that is not running, with its LoRAs; with `images`, its data set as well. It cannot be undone."""
    freed = manage.delete(view.folder_of(run), jobs.idle, images)
    queue.forget(run)
    return {"freed_bytes": freed}


def run_files(run: str) -> list[dict[str, Any]]:
    """The addresses from which the LoRA files of a run can be downloaded, relative to the page's."""
    return [{**_lora(one), "url": file_url(one.path)} for one in view.loras(view.folder_of(run))]


def _lora(one: Lora) -> dict[str, Any]:
    return {"file": one.path.name, "at": one.at, "bytes": one.size}


def run_samples(run: str) -> dict[str, Any]:
    """The prompts; each saved step with its losses, its LoRA and its samples; the best and the picked step."""
    folder = view.folder_of(run)
    shown, found = view.read(folder), view.evolution(folder)
    known = {one.number: one for one in found.prompts}
    numbers = sorted({each.prompt for one in found.snapshots for each in one.samples} | set(known))
    picked, lowest = blind_vote.picked(folder), best(found.validation)

    def prompt(number: int) -> dict[str, Any]:
        one = known.get(number, Prompt(number, "", None))
        return {"number": number, "prompt": one.text or f"Prompt {number + 1}", "seed": one.seed}

    def sample(one: Sample) -> dict[str, Any]:
        seed = {} if one.seed is None else {"seed": one.seed}
        return {**prompt(one.prompt), **seed, "url": file_url(one.path, versioned=True)}

    def row(one: Snapshot) -> dict[str, Any]:
        lora = one.lora
        return {
            "step": one.step,
            "epoch": one.epoch,
            "at": one.at,
            "time": None if one.time is None else datetime.fromtimestamp(one.time, UTC).isoformat(timespec="seconds"),
            "loss": _short(one.loss),
            "val_loss": _short(one.val_loss),
            "picked": one.step is not None and one.step == picked,
            "best": lowest is not None and one.step == lowest[0],
            "lora": lora
            and {"name": lora.path.name, "size": lora.size, "final": lora.final, "url": file_url(lora.path)},
            "samples": [sample(each) for each in one.samples],
        }

    return {
        "run": folder.name,
        "name": shown.name,
        "state": shown.state,
        "prompts": [prompt(number) for number in numbers],
        "snapshots": [row(one) for one in found.snapshots],
        "validation": [{"step": step, "val_loss": _short(value)} for step, value in found.validation],
        "best": None if lowest is None else {"step": lowest[0], "val_loss": _short(lowest[1])},
        "others": [{"name": one.path.name, "url": file_url(one.path, versioned=True)} for one in found.others],
        "picked": picked,
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def run_charts(run: str) -> dict[str, Any]:
    """The charts' lines over the steps: loss, learning rate, GPU use, memory, power, temperature; and its restarts."""
    found = charts.value(view.read(view.folder_of(run)))
    return {"revision": found["revision"], "lines": found.get("lines", []), "marks": found.get("marks", [])}


def run_log(run: str, text: str = "", lines: int = 200) -> list[str]:
    """The last lines of the log; with `text`, those that have it."""
    folder = view.folder_of(run)
    shown = log_view.find(folder, text)[0] if text else log_view.tail(folder)
    return shown[-max(1, min(lines, MOST_LINES)) :]
