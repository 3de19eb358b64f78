"""Pause, resume and requests under the monitor, and extra checkpoints for the store."""

import re

import psutil
import pytest
from monitor_helpers import cli, events, finish, monitor, started, toy_run, wait_for
from run_facts import members, status, weight
from toys import GO, HOLD, undisturbed

from monitor.cli import commands
from monitor.run_folder import MonitorError

pytestmark = pytest.mark.slow


def test_a_paused_run_frees_its_processes_and_goes_on_exactly(folder):
    toy_run(folder, HOLD, steps=30)
    process = started(folder)
    assert finish(monitor(folder, "pause", "--wait", "60"))[0] == 0
    assert finish(process)[0] == 3
    now = status(folder)
    assert now["state"] == "paused" and re.search(r"paused at step \d+; checkpoint: toy-step", now["reason"])
    assert not members(folder)
    cli(folder, "resume-all")
    assert status(folder)["state"] == "paused"
    assert finish(monitor(folder, "resume"))[0] == 0
    wait_for(lambda: events(folder, "completed") and status(folder)["state"] == "completed", what="the end")
    assert weight(folder) == undisturbed(30) and len(events(folder, "paused")) == 1


def test_a_pause_survives_a_killed_monitor(folder):
    toy_run(folder, steps=400, pace=0.1)
    process = started(folder, 2)
    commands.ask_to_end(folder, {"pause": True})
    psutil.Process(status(folder)["monitor_pid"]).kill()  # its keeper starts the next one
    assert finish(process)[0] == 3
    assert status(folder)["state"] == "paused" and not members(folder)


def test_a_request_that_cannot_be_done_says_why(folder):
    toy_run(folder, f"def fault(step):\n{GO}", steps=20)
    with pytest.raises(MonitorError, match="toy: sample images can be made while it trains, but it is never started"):
        commands.request(folder, "sample")
    process = started(folder, 1)
    name = commands.request(folder, "save")
    assert name == commands.request(folder, "save")  # two requests of one kind are one
    (folder / "go").touch()
    assert finish(process)[0] == 0
    found = commands.outcome(folder, name)
    assert found and not found["done"] and found["message"] == "a checkpoint not made: the run is completed"
    with pytest.raises(MonitorError, match="it is completed"):
        commands.request(folder, "save")
