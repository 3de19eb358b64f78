"""A run is logged to trackio by a process of its own: no step twice, none lost. A module of the same name stands in for trackio."""

import contextlib
import json
import sys
from pathlib import Path

import psutil
import pytest
from monitor_helpers import wait_for

from monitor import trackio_feed
from monitor.process.locks import LOCK, Lock
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


def a_run(data: Path, trackers: str = "trackio") -> Path:
    folder = data / "outputs" / "my-run"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(f'name = "my-run"\ntrackers = "{trackers}"\nrank = 8\n')
    return folder


def write(folder: Path, *steps: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"kind": "step", "step": s, "loss": 1 / s, "lr": 1e-4, "step_s": 0.5}) + "\n" for s in steps
        )


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Makes the module `trackio`; returns the file that it writes."""

    def made(source: str) -> Path:
        (tmp_path / "modules").mkdir()
        (tmp_path / "modules" / "trackio.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
        monkeypatch.setenv("LOGGED", str(tmp_path / "logged"))
        return tmp_path / "logged"

    return made


def steps_in(file: Path):
    return lambda: [json.loads(line)[0] for line in file.read_text().splitlines()] if file.exists() else []


def feeders(folder: Path) -> list[psutil.Process]:
    """The children of this process that log the run's steps."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, or gone at this moment
            found += [process] * (str(folder) in process.cmdline())
    return found


def test_a_killed_tracker_continues_where_it_ended(tmp_path, modules):
    folder = a_run(tmp_path)
    logged = steps_in(modules(STAND_IN))
    monitor = Lock(folder / LOCK)
    assert monitor.acquire()
    write(folder, *range(1, 6))
    try:
        trackio_feed.start(RunFolder(folder))
        trackio_feed.start(RunFolder(folder))  # a second attempt: the first process goes on alone
        wait_for(lambda: logged() == [1, 2, 3, 4, 5], what="the first steps")
        wait_for(lambda: len(feeders(folder)) == 1, what="one process logs")
        wait_for((folder / trackio_feed.STATE).exists, what="what was logged is noted")
        feeders(folder)[0].kill()
        wait_for(lambda: not feeders(folder), what="killed")
        write(folder, 4, 5, 6, 7)  # the run restarted too: steps 4 and 5 are repeated
        trackio_feed.start(RunFolder(folder))
        wait_for(lambda: logged() == [1, 2, 3, 4, 5, 6, 7], what="the steps after the kill, none twice")
    finally:
        for process in feeders(folder):
            process.kill()
        monitor.release()


def test_without_trackio_an_event_says_how_to_install_it(tmp_path, modules):
    folder = a_run(tmp_path)
    modules("raise ImportError('No module named trackio')")
    trackio_feed.start(RunFolder(folder))
    events = folder / "events.jsonl"
    wait_for(lambda: events.exists() and "pip install trackio" in events.read_text(), what="the event")
    assert sys.executable in events.read_text()


def test_another_tracker_starts_no_process(tmp_path):
    for name in ("", "tensorboard", "wandb"):
        folder = a_run(tmp_path / (name or "none"), name)
        trackio_feed.start(RunFolder(folder))
        assert feeders(folder) == []
