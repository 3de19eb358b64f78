"""Requests at the worst moment: stops, pauses, pre-emptions, second monitors while the run saves or waits."""

import contextlib
import json
import os
import signal
import sys

import psutil
import pytest
from monitor_helpers import cli, events, finish, kill_monitor, monitor, started, stop, toy_run, wait_for
from run_facts import completed, incidents, members, status, trainers
from toys import HOLD, SHORT

from guards import checkpoint
from monitor.process.platform import LOCK, is_held

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="signals between processes are POSIX"),
]


def ended(folder, state: str) -> dict:
    """Assert that the run is in this final state and that nothing of it lives."""
    now = status(folder)
    assert now["state"] == state, now
    assert members(folder) == [] and trainers(folder) == []
    return now


def test_a_stop_in_the_middle_of_a_save_waits_for_it(folder):
    script = toy_run(folder, **SHORT) / "toy.py"
    slow = "(run / 'saving').touch()\n        time.sleep(1.5)\n        (folder"
    script.write_text(script.read_text().replace("(folder", slow, 1))
    process = monitor(folder)
    wait_for(lambda: (folder / "saving").exists())
    stop(folder)
    assert finish(process)[0] == 3
    now = ended(folder, "stopped")
    assert checkpoint.newest_valid(folder).name == f"toy-step{now['step']:08d}-state"
    assert not list(folder.glob(".*-state*")), "no half-written state is left"


def test_a_sigterm_to_everything_at_once_leaves_a_checkpoint_of_the_last_step(folder):
    """As systemd does with a cgroup, and Slurm with a step: monitor, shell, launcher and trainer all get it."""
    toy_run(folder, steps=100_000, pace=0.03, every=100_000, start="")
    process = started(folder, 15)
    for pid in [*members(folder), status(folder)["monitor_pid"], process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for pid in members(folder):  # a session that ends sends this after it, to those that have not left yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGHUP)
    assert finish(process)[0] == 5
    now = ended(folder, "preempted")
    assert now["checkpoint"]["step"] == now["step"] > 15
    assert incidents(folder) == []


def test_a_stray_sigterm_to_the_trainer_costs_no_step(folder):
    toy_run(folder, HOLD, **SHORT)
    process = started(folder, 14)
    os.kill(trainers(folder)[0], signal.SIGTERM)
    assert finish(process)[0] == 0
    (incident,) = incidents(folder)
    assert incident["cause"] == "terminated" and incident["steps_repeated"] == 0
    assert incident["resumed_from"] == incident["step"] == 16
    completed(folder, restarts=1)


def test_a_training_that_nobody_watches_is_listed_taken_up_and_not_doubled_and_can_be_stopped(tmp_path):
    folder = toy_run(tmp_path / "outputs" / "toy", steps=5000, pace=0.03)
    env = {"HANGPROOF_DATA": str(tmp_path)}
    process = started(folder, 15, **env)
    kill_monitor(process, folder)
    (trainer,) = trainers(folder)
    shown = cli(folder, "status", **env)
    assert "unwatched" in shown and str(folder) in shown and "not watched; start it again" in shown
    other = toy_run(tmp_path / "outputs" / "other", steps=20, pace=0.01)
    assert finish(monitor(other, **env))[0] == 0
    log = (other / "monitor.log").read_text()
    assert f"of {folder} (" in log and f"python -m monitor stop {folder}" in log, "listed at another's start too"
    for _ in range(2):  # the second finds it watched
        shown = cli(folder, "resume-all", "--json", **env)
        assert trainers(folder) == [trainer]
    assert json.loads(shown.splitlines()[-1]) == [], shown
    for name in ("keeper_pid", "monitor_pid"):
        psutil.Process(status(folder)[name]).kill()
    wait_for(lambda: not is_held(folder / LOCK))
    stop(folder, "--wait", "120", **env)
    now = ended(folder, "stopped")
    assert (now["restarts"], now["attempt"]) == (0, 1) and now["checkpoint"]["step"] == now["step"]


@pytest.mark.journey
def test_a_paused_run_saves_first_frees_its_processes_and_goes_on_exactly(folder):
    toy_run(folder, HOLD, steps=30)
    process = started(folder, 14)
    assert finish(monitor(folder, "pause", "--wait", "60"))[0] == 0
    assert finish(process)[0] == 3
    now = ended(folder, "paused")
    assert now["checkpoint"]["step"] == now["step"] == 16
    assert now["reason"] == "paused at step 16; checkpoint: toy-step00000016-state"
    cli(folder, "resume-all")
    assert status(folder)["state"] == "paused"
    assert finish(monitor(folder, "resume"))[0] == 0
    wait_for(lambda: events(folder, "completed") and status(folder)["state"] == "completed", what="the end")
    assert completed(folder, steps=30)["attempt"] == 2 and len(events(folder, "paused")) == 1
    assert "from step 16" in events(folder, "started")[1]["message"]
