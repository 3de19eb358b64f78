"""The start of a hang drill in the background; its run, which goes on without the page, is then one of the list."""

import runs
from runs.files import RunError
from runs.paths import data_root
from ui import jobs
from ui.html import esc
from ui.run import fold

JOB = "drill"
LIMIT_S = 600.0  # for the start alone: the run of the drill goes on without it


def start() -> None:
    """Start a drill. RunError: one is starting already, or it cannot be started."""
    jobs.start(data_root(), JOB, ["launch", "drill", "--no-wait", "--json"], LIMIT_S)


def cancel() -> None:
    """End the start of a drill; a run that it has started goes on."""
    jobs.cancel(data_root(), JOB)


def look() -> tuple[bool, str]:
    """(whether a drill is starting, why the last one did not start or a link to its run, as markup)."""
    job = jobs.read(data_root(), JOB)
    if job is None or job.state == "cancelled":
        return False, ""
    if job.state == "running":
        return True, fold.note("Starting…")
    found = jobs.output(data_root(), JOB)[1]
    if job.state != "done" or not isinstance(found, dict):
        return False, fold.note(f"The drill did not start: {jobs.reason(data_root(), JOB)}", True)
    name = str(found["run"])
    try:
        runs.run_folder(name)
    except RunError:  # deleted since
        return False, ""
    return False, f'<p role="status"><a class="hp-link" href="?run={esc(name)}">Watch the run {esc(name)}</a></p>'
