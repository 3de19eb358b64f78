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

import runs
from runs.files import Fault, RunError, atomic_write
from ui import jobs, scripts
from ui.dataset import calls, draft
from ui.dataset.images import OUT_OF_DATE
from ui.new import form, importing, script_editor

if TYPE_CHECKING:
    import gradio as gr

FOLDER, JOB = "rehearsal", "rehearse"
LIMIT_S = 2400.0  # the command ends by itself before


def _folder(draft_id: object) -> Path:
    if not draft.is_id(draft_id):
        raise RunError(OUT_OF_DATE)
    return draft.folder(draft_id) / FOLDER


def _as_run(spec: "runs.RunSpec", draft_id: str) -> "runs.RunSpec":
    """The spec that a run of the draft gets: with its sample prompt and interval, and with its edited script.

    Raises:
        RunError: Start refuses the edited script.
    """
    from runs.folders import with_sample_interval

    captions = (item.caption for item in draft.items(draft_id))
    return script_editor.for_run(draft_id, with_sample_interval(spec, draft.counts(draft_id), captions))


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

    values, counts = importing.current(draft_id), draft.counts(draft_id)
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
    save(folder, _as_run(reviewed.spec, draft_id))


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
        parsed = form.parse({**importing.current(draft_id), "name": "my-lora"})[0]
        spec = _as_run(parsed, draft_id) if parsed is not None else None
    shown["stale"] = spec is None or rehearse.digest(spec) != found.digest
    if found.state == rehearse.PASSED and spec is not None:
        now = forecast.of(found.measured, spec, draft.counts(draft_id))
        shown["lines"] = [line for line in forecast.lines(now) if line not in now["warnings"]]
        shown["warnings"] = now.get("warnings", [])
    return shown


def _nothing(name: str) -> dict[str, Any]:
    empty: dict[str, Any] = {"stages": [], "lines": [], "warnings": [], "problem": {}, "seconds": 0}
    return {"state": name, "stale": False, **empty}


def check(draft_id: str, values: dict[str, Any]) -> None:
    """Refuse a start once when the rehearsal of these settings failed; the next start means it.

    Raises:
        RunError: where it failed, and that Start can be pressed again.
    """
    from launch import rehearse

    spec = form.parse({**values, "name": values["name"] or "my-lora"})[0]
    folder = _folder(draft_id)
    if spec is None or not (folder / rehearse.FILE).is_file():
        return
    if text := rehearse.ask_once(folder, _as_run(spec, draft_id)):
        raise RunError(f"{text} Press Start again to start anyway")


def keep(draft_id: str, folder: Path) -> None:
    """Keep the rehearsal's result with the run that was made from the draft."""
    from launch import rehearse

    rehearse.hand_on(_folder(draft_id), folder)


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
