"""The hang drill on a run's page: what happens at this moment, and how long each part took. Empty for any other run.

All of it is read from the run's files (launch/drill.py), so it shows the same after a reload or a restart of the server.
"""

from pathlib import Path

from runs.files import RunError
from runs.paths import data_root
from ui import jobs
from ui.html import stage

JOB = "drill"
START_S = 90.0
LIMIT_S = 600.0  # for the start alone: the run of the drill goes on without it
NAMES = {
    "detected": "Detected after",
    "killed": "Killed after",
    "restarted": "Restarted after",
    "recovered": "First new step after",
}


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


def html(folder: Path | None) -> str:
    """The stages of the drill in a run's folder; "" for a run that is no drill."""
    if folder is None or not (folder / "drill.json").is_file():
        return ""
    from launch import drill

    stages, times = drill.stages(folder), drill.times(folder)
    if not stages:
        return ""
    rows = "".join(
        stage(one.key, one.title, one.state, f"{one.at_s:.1f} s · {one.text}" if one.at_s else one.text)
        for one in stages
    )
    measured = "".join(f"<div><dt>{NAMES[name]}</dt><dd>{seconds:.1f} s</dd></div>" for name, seconds in times.items())
    head = "Hang drill <span>A demo run that freezes on purpose. Your own runs are never frozen.</span>"
    return (
        f'<section class="hp-section hp-drill" data-testid="drill"><h3>{head}</h3><ol class="hp-stages">{rows}</ol>'
        f"{f'<dl class=hp-estimates>{measured}</dl>' if times else ''}</section>"
    )
