"""The rehearsal of a draft: `python -m launch rehearse` on the form's settings and two of the draft's images, before there is a run.

It runs in the background (ui/jobs.py) and outlives the page's server: what it rehearses and its result are in the
draft's folder, so any page shows its progress and its end. A result belongs to the settings that were rehearsed; when
they change, it is shown as out of date, and Start no longer asks because of it.
"""

import contextlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gradio as gr

from runs.files import Fault, RunError, atomic_write
from ui import jobs
from ui.dataset import draft
from ui.dataset.images import OUT_OF_DATE
from ui.html import duration, esc, stage
from ui.new import form, run_starts, settings
from ui.run import fold

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


# The fold ----------------------------------------------------------------------------------------------------------------

ABOUT = "Tries this run on the real model: load, two steps, a sample, a checkpoint and a resume."
LOST = "The rehearsal ended without a result, for example because the machine restarted. Rehearse again."
COLOURS = {"passed": "done", "failed": "bad", "running": "busy"}


def build(draft_id: gr.BrowserState) -> None:
    """The fold. Its components are made when it is opened."""
    fold.opened("Rehearse before you start (about 2 minutes)", "rehearsal", draft_id, _draw)


def html(found: dict[str, Any]) -> str:
    """A rehearsal, as `state` returns it."""
    colour = "idle" if found["stale"] else COLOURS.get(found["state"], "idle")
    head = f'<p class="hp-job-state hp-{colour}" role="status" data-testid="rehearsal-state">{esc(headline(found))}</p>'
    parts = [head] if found["state"] != "none" else []
    if found["stages"] and found["state"] not in ("cancelled", "lost"):
        rows = (stage(one["key"], one["title"], one["state"], _text(one)) for one in found["stages"])
        parts.append(f'<ol class="hp-stages">{"".join(rows)}</ol>')
    if found["lines"]:
        parts.append(_verdict("idle" if found["stale"] else "done", found["lines"]))
    parts += [_verdict("warn", [line]) for line in found["warnings"]]
    if found["state"] == "failed":
        problem = found["problem"]
        parts.append(_verdict(colour, [problem["text"], problem["change"]]))
        if problem["log"]:
            log = f'<div class="hp-log" tabindex="0" role="region" aria-label="End of the log"><pre>{esc(problem["log"])}</pre></div>'
            parts.append(f"<details><summary>End of the log</summary>{log}</details>")
    return f'<div class="hp-rehearsal" data-state="{esc(found["state"])}">{"".join(parts)}</div>'


def headline(found: dict[str, Any]) -> str:
    """What a rehearsal does or found, in a sentence; "" without one."""
    took, stale = duration(found["seconds"]), " Out of date: the settings have changed since." if found["stale"] else ""
    if found["state"] == "running":
        busy = next((one["title"].lower() for one in found["stages"] if one["state"] == "running"), "starting")
        return f"Rehearsing for {took}: {busy}…"
    if found["state"] == "failed":
        problem = found["problem"]
        where = f" at “{problem['stage']}”" if problem["stage"] else ""
        return f"The rehearsal failed{where}: {problem['title'].rstrip('.')}.{stale}"
    passed = f"The rehearsal passed in {took}.{stale}"
    return {"passed": passed, "cancelled": "The rehearsal was cancelled.", "lost": LOST}.get(found["state"], "")


def _text(one: dict[str, Any]) -> str:
    took = f"{one['took_s']:.1f} s" if one["took_s"] and one["state"] != "running" else ""
    return " · ".join(filter(None, (took, one["text"])))


def _verdict(colour: str, lines: list[str]) -> str:
    return f'<div class="hp-verdict hp-{colour}">{"".join(f"<p>{esc(line)}</p>" for line in lines if line)}</div>'


def _look(draft_id: str) -> tuple[bool, str]:
    try:
        found = state(draft_id)
    except fold.ERRORS as error:
        return False, fold.note(error, True)
    return found["state"] == "running", html(found)


def _draw(draft_id: str) -> None:
    fold.say(ABOUT)
    go = gr.Button("Rehearse", size="sm", elem_id="rehearse", scale=0, min_width=140)
    jobs_here = fold.Jobs()
    jobs_here.add(
        go, lambda: start(draft_id), lambda: _look(draft_id), lambda: cancel(draft_id), "rehearsal", js=settings.FLUSH
    )
    jobs_here.follow()
