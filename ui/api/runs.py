"""Endpoints of runs: what the tab Runs shows and does."""

from pathlib import Path
from typing import Any

import runs
from launch.publish import SAMPLES
from runs import manage, sweep
from runs.files import RunError
from ui import jobs
from ui.api.checks import page_answer
from ui.run import (
    actions,
    blind_vote,
    calls,
    charts,
    compare,
    control,
    evolution,
    launch_tab,
    log_view,
    publish,
    queue,
    view,
)

TITLE = "Runs"
MOST_LINES = 2000


def list_runs() -> list[dict[str, Any]]:
    """All runs, newest first: name, state, step, planned_steps, progress from 0 to 1."""
    return [_row(one) for one in view.read_all()]


def _row(one: view.View) -> dict[str, Any]:
    return {
        "run": one.folder.name,
        "name": one.name,
        "state": one.state,
        "step": one.number("step"),
        "planned_steps": one.number("planned_steps"),
        "progress": round(one.progress, 4),
        "problem": one.problem,
    }


def run_status(run: str) -> dict[str, Any]:
    """One run: its state, its settings, its LoRA files, its incidents, and what can be done with it now."""
    folder = calls.folder_of(run)
    shown = view.read(folder)
    return {
        **_row(shown),
        "status": shown.status,
        "settings": {key: value for key, value in shown.spec.items() if key != "environment"},
        "loras": [
            {"file": one.path.name, "at": one.at, "bytes": one.size, "final": one.final} for one in view.loras(folder)
        ],
        "incidents": [{"number": one.number, **one.fields} for one in view.incidents(folder)],
        "actions": actions.possible(shown),
    }


def start_run(run: str) -> dict[str, Any]:
    """Start a run, or continue it from its last checkpoint. While the GPU is busy, it waits in the queue."""
    folder = calls.folder_of(run)
    control.start(folder)
    return _row(view.read(folder))


def stop_run(run: str) -> dict[str, Any]:
    """Save a checkpoint and stop."""
    folder = calls.folder_of(run)
    control.stop(folder)
    return _row(view.read(folder))


def pause_run(run: str) -> dict[str, Any]:
    """Save a checkpoint and free the GPU; `start_run` continues exactly there."""
    return actions.act(calls.folder_of(run), "pause")


def sample_now(run: str) -> dict[str, Any]:
    """Draw the sample images after the current step. The training is not changed by it."""
    return actions.act(calls.folder_of(run), "sample")


def save_now(run: str) -> dict[str, Any]:
    """Save a checkpoint after the current step."""
    return actions.act(calls.folder_of(run), "save")


def train_longer(run: str, total: int) -> dict[str, Any]:
    """Continue a completed run to `total` epochs, or to `total` steps where the run is counted in steps."""
    folder = calls.folder_of(run)
    runs.train_longer(folder, total)
    control.start(folder)
    return _row(view.read(folder))


def rename_run(run: str, name: str) -> dict[str, Any]:
    """Give a run another label. Its folder and its files keep their names."""
    folder = calls.folder_of(run)
    manage.rename(folder, name)
    return _row(view.read(folder))


def delete_run(run: str, images: bool = False) -> dict[str, Any]:
    """Delete a run that is not running, with its LoRAs; with `images`, its data set as well. It cannot be undone."""
    freed = manage.delete(calls.folder_of(run), jobs.idle, images)
    queue.follow_delete(run)
    return {"freed_bytes": freed}


def run_files(run: str) -> list[dict[str, Any]]:
    """The addresses from which the LoRA files of a run can be downloaded, relative to the page's."""
    from ui.dataset.images import file_url

    return [
        {"file": one.path.name, "at": one.at, "bytes": one.size, "url": file_url(one.path)}
        for one in view.loras(calls.folder_of(run))
    ]


def run_charts(run: str, axis: str = "step") -> dict[str, Any]:
    """The lines of the charts: loss, learning rate, GPU use, memory, power, temperature. axis: "step" or "time"."""
    return page_answer(charts.chart_data({"run": run, "axis": axis, "from": None, "to": None}))


def run_log(run: str, text: str = "", level: str = "", lines: int = 200) -> list[str]:
    """The last lines of the log; with `text` or a `level` ("warning", "error"), those that it finds."""
    folder = calls.folder_of(run)
    found = log_view.find(folder, text, level=level)[0] if text or level else log_view.tail(folder)
    shown = [line for _, _, line in found]
    return shown[-max(1, min(lines, MOST_LINES)) :]


def compare_runs(runs: list) -> dict[str, Any]:
    """Two to six runs side by side: the settings that differ, the losses, samples, times, memory."""
    return compare.compare([str(one) for one in runs])


def run_evolution(run: str) -> dict[str, Any]:
    """The snapshots of a run: step, loss, validation loss, LoRA, samples; the best so far."""
    return evolution.summary(calls.folder_of(run))


def run_snapshot(run: str, step: int) -> dict[str, Any]:
    """One snapshot of a run."""
    folder = calls.folder_of(run)
    found = evolution.snapshot(folder, step)
    if found is None:
        steps = [one["step"] for one in evolution.summary(folder)["snapshots"] if one["step"] is not None]
        raise RunError(f"There is no snapshot of step {step}; there are: {', '.join(map(str, steps)) or 'none yet'}")
    return found


def pick_lora(run: str, step: int | None) -> dict[str, Any]:
    """Mark the LoRA of a step as the best; null removes the mark. Without a mark, the blind vote on the page names it."""
    folder = calls.folder_of(run)
    blind_vote.pick(folder, step, evolution.evolution(folder))
    return {"picked": blind_vote.picked(folder)}


def rehearse_run(run: str) -> None:
    """Try a run on its real model for about two minutes, in the background; `job` ("rehearse") has the result."""
    launch_tab.start(calls.folder_of(run), "rehearse")


def find_fault(run: str) -> None:
    """Train with 2 images, with 100 and with all, to find out what is wrong, in the background; `job` ("ladder") has the result."""
    launch_tab.start(calls.folder_of(run), "ladder")


def probe_run(run: str) -> None:
    """Train a few steps on one process and on all, in the background; `job` ("probe") has the result."""
    launch_tab.start(calls.folder_of(run), "probe")


def write_launch_files(run: str, kind: str, options: dict | None = None, submit: bool = False) -> None:
    """Write what a run needs elsewhere, in the background; with `submit`, also start it there, which can cost money.

    kind: "slurm", "skypilot", "docker", "runpod", "vast" or "bundle"; `job` ("launch-slurm" and so on) has the result. options:
    by flag, such as {"--time": "8:00:00"}.
    """
    launch_tab.write_files(calls.folder_of(run), kind, options or {}, submit)


def explain_run(run: str) -> dict[str, Any]:
    """What each rank of a run is doing, and which one is stuck. Starts the command; `job` has its result."""
    folder = calls.folder_of(run)
    jobs.start(folder, "diagnose", ["monitor", "diagnose", str(folder)], 120.0)
    return _job(folder, "diagnose")


def job(run: str, name: str) -> dict[str, Any]:
    """The state and the output of a background command of a run: "diagnose", "publish", "launch-slurm" and so on."""
    if not name.replace("-", "").isalnum():
        raise RunError("There is no such command")
    return _job(calls.folder_of(run), name)


def cancel_job(run: str, name: str) -> None:
    """End a background command of a run, with all that it started."""
    launch_tab.cancel(calls.folder_of(run), name)


def _job(folder: Path, name: str) -> dict[str, Any]:
    found = jobs.read(folder, name)
    if found is None:
        raise RunError(f"{name} was not started for {folder.name}")
    text, value, errors = jobs.output(folder, name)
    return {"state": found.state, "seconds": round(found.seconds, 1), "text": text, "value": value, "errors": errors}


def publish_run(
    run: str,
    repo: str = "",
    public: bool = False,
    lora: str = "",
    title: str = "",
    description: str = "",
    licence: str = "",
    samples: int = SAMPLES,
    replace_card: bool = False,
) -> dict[str, Any]:
    """Publish a LoRA on Hugging Face with the token of this machine's login; private unless `public`. `job` has the result."""
    folder = calls.folder_of(run)
    options = {"lora": lora, "title": title, "description": description, "licence": licence, "samples": samples}
    publish.start(folder, repo, public, replace_card, {**options, "base_model": None})
    return _job(folder, publish.JOB)


def preview_card(run: str, lora: str = "", description: str = "", licence: str = "") -> str:
    """The model card that `publish_run` would publish."""
    options = {"lora": lora, "title": "", "description": description, "licence": licence, "samples": SAMPLES}
    return publish.preview(calls.folder_of(run), {**options, "base_model": None})


def list_queue() -> list[dict[str, Any]]:
    """The runs that wait for the GPU, the next one first."""
    return queue.waiting_runs(view.read_all())


def queue_run(run: str) -> dict[str, Any]:
    """Put a run at the end of the queue."""
    return actions.act(calls.folder_of(run), "queue")


def move_in_queue(run: str, position: int) -> dict[str, Any]:
    """Move a waiting run to a position, counted from 1."""
    return queue.change("move", run, position)


def cancel_in_queue(run: str) -> dict[str, Any]:
    """Take a run out of the queue; of a sweep, all its runs that wait."""
    return queue.change("cancel", run)


def run_now(run: str) -> dict[str, Any]:
    """Start a waiting run at once; the run that uses its GPU is paused and continues after it."""
    return queue.change("now", run)


def list_sweeps() -> list[dict[str, Any]]:
    """The sweeps, newest first."""
    return [{"name": one.name, "base": one.base, "runs": [run for run, _ in one.runs]} for one in sweep.all_sweeps()]


def sweep_table(name: str) -> list[dict[str, Any]]:
    """What became of each run of a sweep: values, losses, LoRA, seconds."""
    return sweep.table(sweep.find(name))


ACTIONS = (
    list_runs,
    run_status,
    start_run,
    stop_run,
    pause_run,
    sample_now,
    save_now,
    train_longer,
    rename_run,
    delete_run,
    run_files,
    run_charts,
    run_log,
    compare_runs,
    run_evolution,
    run_snapshot,
    pick_lora,
    rehearse_run,
    find_fault,
    probe_run,
    write_launch_files,
    explain_run,
    job,
    cancel_job,
    publish_run,
    preview_card,
    list_queue,
    queue_run,
    move_in_queue,
    cancel_in_queue,
    run_now,
    list_sweeps,
    sweep_table,
)
