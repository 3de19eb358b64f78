"""The rehearsal of a draft: `python -m launch rehearse` on the form's settings and two of the draft's images, before there is a run.

It runs in the background (ui/jobs.py) and outlives the page's server: what it rehearses and its result are in the draft's
folder, so any page shows its progress and its end. A result belongs to the settings that were rehearsed; when they change,
it is shown as out of date, and Start no longer asks because of it.
"""

import contextlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runs.files import Fault, RunError, atomic_write
from ui import jobs, scripts
from ui.dataset import calls, draft
from ui.dataset.images import OUT_OF_DATE
from ui.new import form, run_starts, settings

if TYPE_CHECKING:
    import gradio as gr

JOB = "rehearse"
LIMIT_S = 2400.0  # the command ends by itself before


def _folder(draft_id: object) -> Path:
    if not draft.is_id(draft_id):
        raise RunError(OUT_OF_DATE)
    return run_starts.rehearsal_folder(draft_id)


def start(draft_id: str) -> None:
    """Rehearse the draft in the background.

    Raises:
        RunError: a field is invalid, there is no image, a rehearsal runs already, or it cannot be started.
    """
    folder = _folder(draft_id)
    if jobs.running(folder, JOB):
        raise RunError("A rehearsal of this draft is running already")
    words = ["launch", "rehearse", str(folder), "--json"]
    jobs.start(folder, JOB, words, LIMIT_S, prepare=lambda: _prepare(folder, draft_id))


def _prepare(folder: Path, draft_id: str) -> None:
    """Write what is rehearsed: the spec, the number of images, and the first of them as a run would get them."""
    from launch import rehearse
    from runs.dataset import ingest
    from runs.machine import this_machine
    from runs.spec import save

    values, counts = settings.current(draft_id), draft.counts(draft_id)
    reviewed = form.review(values, counts, this_machine(values["backend"]))
    wrong = [fault for fault in (*reviewed.missing, *reviewed.faults) if fault.field != "name"]
    if wrong or reviewed.spec is None:
        raise RunError([Fault("", form.shown(fault)) for fault in wrong] or OUT_OF_DATE)
    folder.mkdir(parents=True, exist_ok=True)
    rehearse.forget(folder)
    data = folder / rehearse.DATASET
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    ingest(draft.sources(draft_id)[: rehearse.IMAGES], data)
    atomic_write(folder / rehearse.COUNTS, json.dumps(counts))
    save(folder, run_starts.as_run(draft_id, reviewed.spec))


def cancel(draft_id: str) -> None:
    """End the rehearsal, if one runs."""
    jobs.cancel(_folder(draft_id), JOB)


def state(draft_id: str) -> dict[str, Any]:
    """The draft's last rehearsal as it is now.

    Returns:
        {"state": none, running, passed, failed, cancelled or lost, "stale": the settings have changed since, "seconds",
        "stages": [{"key", "title", "state", "took_s", "text"}], "lines": the forecast for the settings as they are now,
        "warnings": sentences, "problem": {"stage", "title", "text", "change", "log"}}
    """
    folder = _folder(draft_id)
    if not folder.is_dir():  # each page asks when it is opened: nothing is imported for that
        return _nothing("none")
    from launch import forecast, rehearse

    job, found = jobs.read(folder, JOB), rehearse.read(folder)
    busy = job is not None and job.state == "running"
    if found is None:
        if job is None or job.state == "cancelled":
            return _nothing("none")
        if busy:
            return {**_nothing("running"), "seconds": round(job.seconds)}
        _, _, errors = jobs.output(folder, JOB)
        text = (errors.strip().splitlines() or ["It ended without a result."])[-1].removeprefix("launch rehearse: ")
        problem = {"stage": "", "title": "It could not be tried", "text": text, "change": "", "log": ""}
        return {**_nothing("failed"), "problem": problem}
    shown: dict[str, Any] = {
        "state": found.state, "stale": False, "lines": [], "warnings": [], "problem": found.problem,
        "stages": [asdict(stage) for stage in found.stages],
        "seconds": round(job.seconds) if busy and job is not None else round(found.took_s),
    }  # fmt: skip
    if found.state == rehearse.RUNNING:
        return shown
    spec = None
    with contextlib.suppress(RunError):  # the edited script is refused now: what was rehearsed is out of date
        parsed = form.parse({**settings.current(draft_id), "name": "my-lora"})[0]
        spec = run_starts.as_run(draft_id, parsed) if parsed is not None else None
    shown["stale"] = spec is None or rehearse.digest(spec) != found.digest
    if found.state == rehearse.PASSED and spec is not None:
        now = forecast.of(found.measured, spec, draft.counts(draft_id))
        shown["lines"] = [line for line in forecast.lines(now) if line not in now["warnings"]]
        shown["warnings"] = now.get("warnings", [])
    return shown


def _nothing(name: str) -> dict[str, Any]:
    empty: dict[str, Any] = {"stages": [], "lines": [], "warnings": [], "problem": {}, "seconds": 0}
    return {"state": name, "stale": False, **empty}


# Calls of the script ------------------------------------------------------------------------------------------------------


def rehearsal(data: dict[str, Any]) -> dict[str, Any]:
    """{"draft": id, "do": start, cancel or show}: the state after it, or why not."""

    def action(draft_id: str, data: dict[str, Any]) -> dict[str, Any]:
        if data.get("do") == "start":
            start(draft_id)
        elif data.get("do") == "cancel":
            cancel(draft_id)
        return state(draft_id)

    return calls.answer(action, data)


def build() -> "gr.HTML":
    """The button and what it shows."""
    return scripts.component("rehearsal", "rehearsal", rehearsal)
