"""A run is logged to trackio by a process of its own: no step twice, none lost. A module of the same name stands in for trackio."""

import contextlib
import json
import sys
from pathlib import Path

import psutil
import pytest
from monitor_helpers import wait_for

from monitor import start, trackio_feed
from monitor.process.platform import LOCK, Lock
from monitor.run_folder import RunFolder

STAND_IN = """
import json, os
class Run:
    def log(self, values, step):
        with open(os.environ["LOGGED"], "a") as file:
            file.write(json.dumps([step, values]) + "\\n")
    def finish(self):
        open(os.environ["LOGGED"] + ".finished", "w").close()
def init(**known):
    assert known["name"] == "my-run" and known["config"]["rank"] == 8, known
    return Run()
"""


def a_run(data: Path) -> Path:
    folder = data / "outputs" / "my-run"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text('name = "my-run"\ntrackers = "trackio"\nrank = 8\n')
    return folder


def write(folder: Path, *steps: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"kind": "step", "step": s, "loss": 1 / s, "lr": 1e-4, "step_s": 0.5}) + "\n" for s in steps
        )


@pytest.fixture
def logged(tmp_path, monkeypatch) -> Path:
    """The file to which the stand-in for the module `trackio` writes."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "trackio.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setenv("LOGGED", str(tmp_path / "logged"))
    return tmp_path / "logged"


def feeders(folder: Path) -> list[psutil.Process]:
    """The children of this process that log the run's steps."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, or gone at this moment
            found += [process] * (str(folder) in process.cmdline())
    return found


def test_a_killed_tracker_continues_where_it_ended(tmp_path, logged):
    def steps():
        return [json.loads(line)[0] for line in logged.read_text().splitlines()]

    folder = a_run(tmp_path)
    monitor = Lock(folder / LOCK)
    assert monitor.acquire()
    write(folder, *range(1, 6))
    try:
        start.start_tracker(RunFolder(folder))
        start.start_tracker(RunFolder(folder))  # a second attempt: the first process goes on alone
        wait_for(lambda: steps() == [1, 2, 3, 4, 5], what="the first steps")
        wait_for(lambda: len(feeders(folder)) == 1, what="one process logs")
        wait_for((folder / trackio_feed.STATE).exists, what="what was logged is noted")
        feeders(folder)[0].kill()
        wait_for(lambda: not feeders(folder), what="killed")
        write(folder, 4, 5, 6, 7)  # the run restarted too: steps 4 and 5 are repeated
        start.start_tracker(RunFolder(folder))
        wait_for(lambda: steps() == [1, 2, 3, 4, 5, 6, 7], what="the steps after the kill, none twice")
    finally:
        for process in feeders(folder):
            process.kill()
        monitor.release()


def test_without_trackio_an_event_says_how_to_install_it(tmp_path, logged):
    (tmp_path / "modules" / "trackio.py").write_text("raise ImportError('No module named trackio')")
    folder = a_run(tmp_path)
    start.start_tracker(RunFolder(folder))
    events = folder / "events.jsonl"
    wait_for(lambda: "pip install trackio" in events.read_text(), what="the event")
    assert sys.executable in events.read_text()
