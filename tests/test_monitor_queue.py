"""Runs that want the same GPU: first come, first served, by locks that go with their holders."""

import subprocess
import sys

import pytest
from monitor_helpers import (
    ROOT,
    environment,
    events,
    finish,
    members,
    monitor,
    status,
    step_of,
    stop,
    toy_run,
    trainers,
    wait_for,
)

from monitor import queue

GPU = {"HANGPROOF_GPUS": "0"}


@pytest.fixture
def waiting(tmp_path):
    """Two waiting runs behind one that trains: (folders, their monitors), in the order they asked."""
    (tmp_path / "outputs").mkdir()
    names = ("first", "second", "third")
    folders = [toy_run(tmp_path / "outputs" / name, steps=5000 if name == "first" else 60, pace=0.03) for name in names]
    env = {**GPU, "HANGPROOF_DATA": str(tmp_path)}
    processes = []
    for folder in folders:
        processes.append(monitor(folder, **env))
        wait_for(lambda f=folder: "GPU 0" in status(f)["message"] or step_of(f) > 3)
    yield folders, processes, env
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()
    for folder in folders:
        for pid in trainers(folder):
            subprocess.run(["kill", "-9", str(pid)], check=False)


def test_they_train_one_after_the_other_in_the_order_they_asked(waiting):
    folders, processes, env = waiting
    assert [status(f)["state"] for f in folders] == ["running", "queued", "queued"]
    stop(folders[0], "--now", **env)
    assert [finish(p)[0] for p in processes] == [3, 0, 0]
    starts = [events(f, "started")[0]["t"] for f in folders]
    ends = [events(f, kind)[0]["t"] for f, kind in zip(folders, ("stopped", "completed", "completed"), strict=True)]
    assert starts[0] < ends[0] <= starts[1] < ends[1] <= starts[2]


def test_status_says_who_has_the_gpu_and_how_many_asked_before(waiting):
    folders, _, env = waiting
    command = [sys.executable, "-m", "monitor", "status"]
    shown = subprocess.run(
        command, cwd=ROOT, env=environment(folders[0], **env), capture_output=True, text=True, check=True
    ).stdout
    assert "second: queued, step 0. waiting for GPU 0: the run 'first' uses it" in shown
    assert "third: queued, step 0. waiting for GPU 0: 1 run asked before" in shown


def test_a_waiting_run_can_be_stopped_and_its_place_goes_to_the_next(waiting):
    folders, processes, env = waiting
    stop(folders[1], **env)
    assert finish(processes[1])[0] == 3
    assert status(folders[1])["state"] == "stopped" and events(folders[1], "started") == []
    wait_for(lambda: "'first' uses it" in status(folders[2])["message"])
    stop(folders[0], "--now", **env)
    assert finish(processes[2])[0] == 0


def test_the_place_of_a_killed_monitor_goes_to_the_next(waiting):
    folders, processes, env = waiting
    processes[1].kill()
    processes[1].communicate()
    wait_for(lambda: "'first' uses it" in status(folders[2])["message"])
    stop(folders[0], "--now", **env)
    assert finish(processes[2])[0] == 0


def test_the_gpu_stays_taken_while_the_training_of_a_killed_monitor_lives(waiting):
    folders, processes, env = waiting
    processes[0].kill()
    processes[0].communicate()
    before = status(folders[1])["updated_at"]
    wait_for(lambda: status(folders[1])["updated_at"] > before)
    wait_for(lambda: status(folders[1])["updated_at"] > before and members(folders[0]))
    assert status(folders[1])["state"] == "queued" and trainers(folders[0])
    stop(folders[0], "--now", "--wait", "120", **env)
    assert [finish(p)[0] for p in processes[1:]] == [0, 0]


def test_the_gpus_of_a_run_come_from_the_environment_and_its_spec(monkeypatch):
    monkeypatch.delenv("HANGPROOF_GPUS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert queue.devices({}) == ["2"] and queue.devices({"gpus": 2}) == ["2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert queue.devices({}) == []
    monkeypatch.setenv("HANGPROOF_GPUS", "a")
    assert queue.devices({}) == ["a"]
