"""The start of a hang drill; the page then shows it as any run, with its incident."""

from runs.files import RunError
from runs.paths import data_root
from ui import jobs

JOB = "drill"
START_S = 90.0
LIMIT_S = 600.0  # for the start alone: the run of the drill goes on without it


def start(kind: str = "worker") -> str:
    """Start a drill; returns the name of the run's folder. The run outlives the server.

    Raises:
        RunError: there is no such drill, or it cannot be started.
    """
    from launch import drill

    if kind not in drill.FAULTS:
        raise RunError("There is no such drill; reload the page")
    words = ["launch", "drill", f"--kind={kind}", "--no-wait", "--json"]
    jobs.start(data_root(), JOB, words, LIMIT_S)
    job = jobs.wait(data_root(), JOB, START_S)
    _, found, errors = jobs.output(data_root(), JOB)
    if job is None or job.state == "running":
        raise RunError(f"The drill did not start within {START_S:.0f} s. Look at the tab Runs")
    if job.state != "done":
        last = (errors.strip().splitlines() or ["it ended without a result"])[-1]
        raise RunError(f"The drill did not start: {last.removeprefix('launch drill: ')}")
    return str(found["run"])


def choices() -> list[dict[str, str]]:
    """What a drill can freeze: [{"kind", "label", "text"}], the usual one first."""
    from launch import drill

    order = sorted(drill.FAULTS, key=lambda kind: kind != drill.USUAL)
    return [{"kind": kind, "label": drill.FAULTS[kind].label, "text": drill.FAULTS[kind].text} for kind in order]
