"""The start of a hang drill; the page then shows it as any run, with its incident."""

from runs.files import RunError
from runs.paths import data_root
from ui import jobs

JOB = "drill"
START_S = 90.0
LIMIT_S = 600.0  # for the start alone: the run of the drill goes on without it


def start() -> str:
    """Start a drill; returns the name of the run's folder. The run outlives the server. Raises RunError: it cannot be started."""
    jobs.start(data_root(), JOB, ["launch", "drill", "--no-wait", "--json"], LIMIT_S)
    job = jobs.wait(data_root(), JOB, START_S)
    _, found, errors = jobs.output(data_root(), JOB)
    if job is None or job.state == "running":
        raise RunError(f"The drill did not start within {START_S:.0f} s. Look at the tab Runs")
    if job.state != "done":
        last = (errors.strip().splitlines() or ["it ended without a result"])[-1]
        raise RunError(f"The drill did not start: {last.removeprefix('launch drill: ')}")
    return str(found["run"])
