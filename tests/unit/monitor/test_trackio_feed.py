"""A run is logged to trackio by a process of its own: no step twice, none lost, and nothing that a tracker does stops the run.

TRACKIO_VENV names an environment with trackio; without one, a module of the same name stands in for it, which writes a file.
"""

import json
import os
import sqlite3
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import runs
from monitor import trackio_feed
from monitor.process.locks import LOCK, Lock
from monitor.run_folder import RunFolder

WAIT_S = 90
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


def until(condition, what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.fixture(params=["stand-in", "trackio"])
def logged(request, tmp_path, monkeypatch):
    """The steps that the tracker has, in order."""
    if request.param == "trackio":
        venv = os.environ.get("TRACKIO_VENV")
        if not venv:
            pytest.skip("TRACKIO_VENV names no environment with trackio")
        monkeypatch.setenv("PYTHONPATH", str(next(Path(venv).glob("lib/python*/site-packages"))))
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))

        def steps() -> list[int]:
            database = tmp_path / "trackio" / "hangproof.db"
            if not database.exists():
                return []
            with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
                try:
                    return [row[0] for row in connection.execute("SELECT step FROM metrics ORDER BY step")]
                except sqlite3.OperationalError:
                    return []

        return steps
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "trackio.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setenv("LOGGED", str(tmp_path / "logged"))
    file = tmp_path / "logged"
    return lambda: [json.loads(line)[0] for line in file.read_text().splitlines()] if file.exists() else []


def feeders(folder: Path) -> list[psutil.Process]:
    """The children of this process that log the run's steps."""
    children = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in children if str(folder) in p.cmdline()]


def test_a_killed_tracker_continues_where_it_ended(tmp_path, logged):
    folder = a_run(tmp_path)
    monitor = Lock(folder / LOCK)
    assert monitor.acquire()
    write(folder, *range(1, 6))
    try:
        trackio_feed.start(RunFolder(folder))
        trackio_feed.start(RunFolder(folder))  # a second attempt: the first process goes on alone
        until(lambda: logged() == [1, 2, 3, 4, 5], "the first steps")
        until(lambda: len(feeders(folder)) == 1, "one process logs")
        until((folder / trackio_feed.STATE).exists, "what was logged is noted")
        feeders(folder)[0].kill()
        until(lambda: not feeders(folder), "killed")
        write(folder, 4, 5, 6, 7)  # the run restarted too: steps 4 and 5 are repeated
        trackio_feed.start(RunFolder(folder))
        until(lambda: logged() == [1, 2, 3, 4, 5, 6, 7], "the steps after the kill, none twice")
    finally:
        for process in feeders(folder):
            process.kill()
        monitor.release()


def test_without_trackio_an_event_says_how_to_install_it(tmp_path, monkeypatch):
    folder = a_run(tmp_path)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "trackio.py").write_text("raise ImportError('No module named trackio')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    trackio_feed.start(RunFolder(folder))
    events = folder / "events.jsonl"
    until(lambda: events.exists() and "pip install trackio" in events.read_text(), "the event")
    assert sys.executable in events.read_text()


def test_another_tracker_starts_no_process(tmp_path):
    for name in ("", "tensorboard", "wandb"):
        folder = a_run(tmp_path / (name or "none"), name)
        trackio_feed.start(RunFolder(folder))
        assert feeders(folder) == []


def test_the_process_ends_after_the_run(tmp_path):
    folder = a_run(tmp_path)
    write(folder, 1, 2)
    found = []
    tracker = type("Tracker", (), {"log": lambda self, values, step: found.append(step)})()
    trackio_feed.feed(folder, tracker, poll_s=0.02, end_s=0.1)
    write(folder, 3)
    trackio_feed.feed(folder, tracker, poll_s=0.02, end_s=0.1)
    assert found == [1, 2, 3]


def test_a_gpus_values_are_logged_with_the_next_step():
    lines = [
        {"kind": "gpu", "gpu": 0, "power_w": 200},
        {"kind": "step", "step": 1, "loss": 1.0},
        {"kind": "step", "step": 2, "loss": None},
    ]
    assert list(trackio_feed.entries(lines, 0, {})) == [(1, {"loss": 1.0, "gpu0/power_w": 200.0}), (2, {})]


def test_no_trainer_gets_the_option(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    spec = runs.make({"name": "a", "trackers": "trackio"})
    assert spec.trackers == "trackio"
    from runs import command

    for trackers, expected in (("trackio", False), ("tensorboard", True)):
        flags = command.flags(runs.make({"name": "a", "trackers": trackers}), tmp_path)
        assert ("log_with" in flags) == expected


@given(st.lists(st.binary(max_size=80), max_size=20))
def test_no_line_can_break_it(tmp_path_factory, noise):
    path = tmp_path_factory.mktemp("noise") / "metrics.jsonl"
    path.write_bytes(b"\n".join(noise) + b'\n{"kind":"step","step":7,"loss":0.5}\n')
    lines, end = trackio_feed.lines_after(path, 0)
    assert end == path.stat().st_size
    assert list(trackio_feed.entries(lines, 0, {}))[-1] == (7, {"loss": 0.5})
