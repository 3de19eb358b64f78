"""The rehearsal of a draft: `python -m launch rehearse` on its settings and two of its images, before there is a run.

It runs in the background (ui/jobs.py) and outlives the page's server: what it rehearses and its result are in the
draft's folder, so any page shows its progress and its end. A result belongs to the settings that were rehearsed; when
they change, it is shown as out of date, and Start no longer asks because of it.
"""

import contextlib
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import gradio as gr

from runs.files import Fault, RunError
from ui import jobs
from ui.dataset import draft
from ui.dataset.draft import OUT_OF_DATE
from ui.html import duration, part
from ui.new import form, run_starts
from ui.new.run_starts import rehearsal_folder
from ui.run import fold

if TYPE_CHECKING:
    import runs
    from launch import rehearse

JOB = "rehearse"
LIMIT_S = 2400.0  # the command ends by itself before


def start(draft_id: str) -> None:
    """Rehearse the draft in the background.

    Raises:
        RunError: a field is invalid, there is no image, it runs already, or it cannot be started.
    """
    folder = rehearsal_folder(draft_id)
    words = ["launch", "rehearse", str(folder), "--json"]
    jobs.start(folder, JOB, words, LIMIT_S, prepare=lambda: _prepare(folder, draft_id))


def _prepare(folder: Path, draft_id: str) -> None:
    """Write what is rehearsed: the spec, and the first images as a run would get them."""
    from launch import rehearse
    from runs.dataset import ingest
    from runs.spec import save

    reviewed = form.reviewed(draft_id)
    wrong = [fault for fault in (*reviewed.missing, *reviewed.faults) if fault.field != "name"]
    if wrong or reviewed.spec is None:
        raise RunError([Fault("", form.shown(fault)) for fault in wrong] or OUT_OF_DATE)
    folder.mkdir(parents=True, exist_ok=True)
    forget(folder)
    data = folder / rehearse.DATASET
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    ingest(draft.sources(draft_id)[: rehearse.IMAGES], data)
    save(folder, run_starts.for_run(draft_id, reviewed.spec))


def forget(folder: Path) -> None:
    """Remove the result of the last rehearsal: one that cannot begin has none."""
    from launch import rehearse

    (folder / rehearse.FILE).unlink(missing_ok=True)


# The fold -------------------------------------------------------------------------------------------------------------

SHEET = functools.partial(part, "new/folds.html", "rehearsal")
ABOUT = "Tries this run on the real model: load, two steps, a sample, a checkpoint and a resume."
ENDED = {
    "cancelled": "The rehearsal was cancelled.",
    "lost": "The rehearsal ended without a result, for example because the machine restarted. Rehearse again.",
}


def look(draft_id: str) -> tuple[bool, str]:
    """(whether the draft is being rehearsed, its last rehearsal as it is now as markup)."""
    folder = rehearsal_folder(draft_id)
    if not folder.is_dir():  # nothing is imported for a draft that was never rehearsed
        return False, ""
    return shown(folder, lambda: _spec_now(draft_id), lambda: draft.counts(draft_id))


def shown(
    folder: Path, spec_now: Callable[[], "runs.RunSpec | None"], counts: Callable[[], dict[str, int]]
) -> tuple[bool, str]:
    """(whether what is in `folder` is being rehearsed, its last rehearsal as it is now as markup).

    spec_now, counts: the settings and images that a run would have now, which may differ from what was rehearsed.
    """
    from launch import rehearse

    job, found = jobs.read(folder, JOB), rehearse.read(folder)
    busy = job is not None and job.state == "running"
    took = duration(round(job.seconds if busy and job is not None else found.took_s if found else 0))
    if found is None and (job is None or job.state == "cancelled"):
        return False, ""
    if found is None and not busy:
        verdicts = [("bad", [jobs.reason(folder, JOB)])]
        return False, SHEET("failed", "bad", "The rehearsal failed: It could not be tried.", verdicts=verdicts)
    if found is None or found.state == rehearse.RUNNING:
        stages = found.stages if found else []
        doing = next((one.title.lower() for one in stages if one.state == "running"), "starting")
        return True, SHEET("running", "busy", f"Rehearsing for {took}: {doing}…", stages)
    spec = None
    with contextlib.suppress(RunError):
        spec = spec_now()
    fresh = spec is not None and rehearse.digest(spec) == found.digest
    stale = "" if fresh else " Out of date: the settings have changed since."
    if found.state == rehearse.PASSED:
        colour, verdicts = "done" if fresh else "idle", _forecast(found, spec, counts(), fresh) if spec else []
        return False, SHEET("passed", colour, f"The rehearsal passed in {took}.{stale}", found.stages, verdicts)
    if found.state == "failed":
        problem, colour = found.problem, "bad" if fresh else "idle"
        where = f" at “{problem['stage']}”" if problem["stage"] else ""
        said = f"The rehearsal failed{where}: {problem['title'].rstrip('.')}.{stale}"
        verdicts = [(colour, [problem["text"], problem["change"]])]
        return False, SHEET("failed", colour, said, found.stages, verdicts, problem["log"])
    return False, SHEET(found.state, "idle", ENDED.get(found.state, ""))


def _spec_now(draft_id: str) -> "runs.RunSpec | None":
    """The spec that a run of the draft would get now; None where a field is invalid. RunError: the edited script is."""
    parsed = form.parse({**form.current(draft_id), "name": "my-lora"})[0]
    return run_starts.for_run(draft_id, parsed) if parsed is not None else None


def _forecast(
    found: "rehearse.Rehearsal", spec: "runs.RunSpec", counts: dict[str, int], fresh: bool
) -> list[tuple[str, list[str]]]:
    """What the rehearsal says of the settings as they are now: (colour, lines) of each box."""
    from launch import forecast

    now = forecast.of(found.measured, spec, counts)
    warnings = now.get("warnings", [])
    lines = [line for line in forecast.lines(now) if line not in warnings]
    return [("done" if fresh else "idle", lines), *(("warn", [line]) for line in warnings)]


def draw(draft_id: str) -> None:
    """Make the components of the fold."""
    fold.say(ABOUT)
    go = gr.Button("Rehearse", size="sm", elem_id="rehearse", scale=0, min_width=140)
    begin, now = functools.partial(start, draft_id), functools.partial(look, draft_id)
    cancel = functools.partial(jobs.cancel, rehearsal_folder(draft_id), JOB)
    fold.job(go, begin, now, cancel, "rehearsal", js=form.FLUSH)
