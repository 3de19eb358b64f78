"""The hang drill: its stages are read from a run's files; the real one freezes, recovers and finishes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import runs
from launch import drill
from launch.common import LaunchError
from runs.paths import ROOT
from ui.run import drill as shown


def write(folder: Path, state: str, step: int, *events: dict, incident: dict | None = None) -> Path:
    """The files of a drill as the monitor writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / drill.FILE).write_text(json.dumps({"kind": "worker"}))
    (folder / "status.json").write_text(json.dumps({"state": state, "step": step, "message": "All steps are trained"}))
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events) + '{"torn')
    if incident:
        (folder / "incidents" / "0001").mkdir(parents=True, exist_ok=True)
        (folder / "incidents" / "0001" / "incident.json").write_text(json.dumps(incident))
    return folder


STARTED = {"kind": "started", "message": "attempt 1 from the start", "mono_s": 100.0}
HANG = {"kind": "hang", "message": "A loader worker is stuck", "mono_s": 112.5, "since_s": 2.5}
KILLED = {"kind": "killed", "message": "killed 4 processes in 0.1 s: bash (1)", "mono_s": 113.0}
RESTARTED = {"kind": "restarted", "message": "attempt 2 from step 20", "mono_s": 114.0}
PROGRESS = {"kind": "progress", "message": "step 26 is new: recovered in 12.0 s", "mono_s": 122.0}
INCIDENT = {"explanation": "A worker was asleep in load (npz.py:10)."}


@pytest.mark.parametrize(
    ("state", "step", "events", "running", "done"),
    [
        ("running", 3, [STARTED], "train", []),
        ("running", 72, [STARTED], "detect", ["train", "freeze"]),
        ("recovering", 72, [STARTED, HANG], "kill", ["train", "freeze", "detect", "explain"]),
        ("recovering", 72, [STARTED, HANG, KILLED], "restart", ["train", "freeze", "detect", "explain", "kill"]),
        ("running", 71, [STARTED, HANG, KILLED, RESTARTED], "recover", ["train", "freeze", "detect", "explain", "kill", "restart"]),
        ("running", 80, [STARTED, HANG, KILLED, RESTARTED, PROGRESS], "end", None),
        ("completed", 100, [STARTED, HANG, KILLED, RESTARTED, PROGRESS], None, None),
    ],
)  # fmt: skip
def test_each_stage_is_shown_when_it_is_reached(tmp_path, state, step, events, running, done):
    incident = INCIDENT if HANG in events else None
    folder = write(tmp_path / "drill", state, step, *events, incident=incident)
    stages = {stage.key: stage for stage in drill.stages(folder)}
    assert next((key for key, stage in stages.items() if stage.state == "running"), None) == running
    reached = [key for key, stage in stages.items() if stage.state == "done"]
    assert reached == (done if done is not None else [key for key in stages if key != running]), reached
    text = shown.html(folder)
    assert text.count("<li ") == len(stages) and (not incident or "npz.py:10" in text)


@pytest.mark.parametrize(
    ("state", "step", "attempt", "events", "done"),
    [
        ("stopped", 12, 1, [STARTED], ["train", "end"]),
        ("stopped", 72, 1, [STARTED, KILLED], ["train", "freeze", "end"]),  # frozen, and killed because it was stopped
        ("failed", 72, 2, [STARTED, HANG, KILLED], ["train", "freeze", "detect", "explain", "kill", "end"]),
        ("completed", 100, 2, [STARTED], ["train", "end"]),  # paused before it froze, then resumed
        ("running", 75, 2, [STARTED], []),
    ],
)
def test_a_stage_that_did_not_happen_is_not_shown_as_done(tmp_path, state, step, attempt, events, done):
    folder = write(tmp_path / "drill", state, step, *events, incident=INCIDENT if HANG in events else None)
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "attempt": attempt, "reason": "Stopped by you"}))
    stages = {stage.key: stage for stage in drill.stages(folder)}
    assert [key for key, stage in stages.items() if stage.state == "done"] == done
    rest = {stage.state for key, stage in stages.items() if key not in done}
    assert rest == ({"skipped"} if state != "running" else {"running", "waiting"})
    assert stages["end"].title == ("Ended" if state in ("stopped", "failed") else "Finished")
    assert ("did not happen" in shown.html(folder)) == (state != "running")


def test_the_times_are_counted_from_the_freeze(tmp_path):
    folder = write(
        tmp_path / "d", "completed", 100, STARTED, HANG, KILLED, RESTARTED, PROGRESS, incident=INCIDENT
    )  # the last progress was at 110.0
    assert drill.times(folder) == {"detected": 2.5, "killed": 3.0, "restarted": 4.0, "recovered": 12.0}
    assert "<dd>12.0 s</dd>" in shown.html(folder)


def test_another_run_has_no_drill(tmp_path):
    assert drill.stages(tmp_path) == [] and shown.html(tmp_path) == "" and shown.html(None) == ""
    folder = write(tmp_path / "d", "running", 1)
    for content in ("", "[]", '{"kind": "other"}', '{"kind": ["worker"]}'):
        (folder / drill.FILE).write_text(content)
        assert drill.stages(folder) == []
    hostile = write(
        tmp_path / "e", "recovering", 25, {**HANG, "message": "<img src=x>"}, incident={"explanation": "<b>x</b>"}
    )
    assert "<img" not in shown.html(hostile) and "&lt;b&gt;" in shown.html(hostile)


def test_only_a_demo_run_can_be_frozen(data):
    with pytest.raises(LaunchError, match="there is no drill"):
        drill.start("my-run")
    assert runs.list_runs() == []
    done = subprocess.run(
        [sys.executable, "-m", "launch", "drill", "my-run"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
