"""A run with a store, as real processes: keeper, monitor, agent and a toy trainer; a machine is an empty data root."""

import json
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest
from machines import Machine, Toy
from monitor_helpers import events, wait_for
from PIL import Image
from run_facts import step_of

import runs
from launch.store import copies
from launch.store.agent import Report
from launch.store.lease import current
from launch.store.places import open_place
from monitor import store
from monitor.cli.commands import line
from monitor.state import read_status

STEPS, LONG, EVERY = 80, 160, 20
TRAINING = Toy(STEPS, EVERY, step_s=0.03)
SLOW = Toy(STEPS * 5, EVERY, step_s=0.04)  # for a run that is stopped


@pytest.fixture
def machine(tmp_path, request):
    """Make machines; afterwards nothing of them runs."""

    def make(name: str, training=TRAINING, **env: str) -> Machine:
        one = Machine(training, tmp_path / name, env, limits={"bandwidth_bytes": 0})
        request.addfinalizer(one.kill)
        return one

    return make


@pytest.fixture
def address(tmp_path) -> str:
    return str(tmp_path / "store")


def agent_of(one: Machine) -> int:
    """The process number of the agent that holds the lease; 0 while none does."""
    values = json.loads((one.folder / store.STORE).read_text())
    return values["pid"] if values["lease"] == "held" else 0


def running(machine, address: str, training) -> Machine:
    """A machine that has trained a step."""
    one = machine("one", training)
    training.create(one.data, {"store": address})
    one.run()
    one.until(lambda: training.trained(one.data), "the first step")
    return one


def copied(one: Machine) -> Machine:
    """The machine, with a checkpoint in the store."""
    one.until(lambda: one.status().get("store", {}).get("step"), "a checkpoint in the store")
    return one


def finished(address: str, step: int) -> copies.Manifest:
    """Assert that the store has the finished run of so many steps; its manifest."""
    manifest = copies.newest_manifest(open_place(address).under("toy"), "toy")
    assert manifest.step == step and manifest.completed and "run/toy.safetensors" in manifest.files
    return manifest


@pytest.mark.slow
def test_a_pre_empted_run_moves_away_and_back_and_an_empty_machine_trains_it_longer(machine, address, tmp_path):
    # From step 45 on a step takes a second, until `hurry` is there: on a busy machine, too, the run is not over before.
    pace = {"HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_SLOW": f"45:1:{tmp_path / 'hurry'}"}
    first = machine("first", SLOW, **pace)
    SLOW.create(first.data, {"store": address, "max_train_steps": LONG})
    (first.folder / "sample").mkdir()
    Image.new("RGB", (8, 8)).save(first.folder / "sample" / "toy_000020.png")
    steps, place, second = [], open_place(address).under("toy"), machine("second", SLOW, **pace)
    first.run()
    copied(first)
    assert second.restore(address)
    second.run()
    assert second.wait(60) == 4, second.output()
    reason = second.status()["reason"]
    assert socket.gethostname() in reason and "trains this run" in reason and " since 20" in reason
    assert not SLOW.trained(second.data), "the refused machine trained nothing"
    for one in (first, second):
        if steps:
            assert one.restore(address) and one.restored["step"] == steps[-1]
            one.run()
        after = steps[-1] + 10 if steps else 15
        wait_for(lambda one=one, after=after: step_of(one.folder) >= after, what="steps")
        one.process.send_signal(signal.SIGTERM)
        assert one.wait(60) == 5, one.output()
        steps.append(one.newest_checkpoint())
        assert copies.newest_manifest(place, "toy").step == steps[-1], "the last checkpoint is in the store"
        assert current(place).released
    # The first machine comes back with an old disk: `monitor run` alone fetches what is newer.
    (tmp_path / "hurry").touch()
    first.run()
    assert first.wait(120) == 0, first.output()
    assert events(first.folder, "restored")[-1]["step"] == steps[-1] > steps[0]
    trained = SLOW.trained(first.data)
    assert trained[trained.index(steps[0]) + 1] == steps[-1] + 1, "no step was trained twice"
    assert first.lora() == Toy(LONG, EVERY).expected()
    now = first.status()
    assert now["state"] == "completed" and now["store"]["step"] == LONG and now["store"]["pending"] is None
    assert json.loads(place.read("status.json"))["state"] == "completed", "a page elsewhere shows the end"
    stored = finished(address, LONG).files
    assert {"run/events.jsonl", "run/sample/toy_000020.png"} <= stored.keys()
    place.put("requests/stop.json", b'{"now": false}')  # on a page elsewhere, after the end

    third = machine("third")
    assert third.restore(address) and third.lora() == first.lora()
    assert (third.folder / "sample" / "toy_000020.png").exists()
    third.run()
    assert third.wait(60) == 0 and "already completed" in third.output()
    assert not TRAINING.trained(third.data)
    assert runs.train_longer(third.folder, LONG + EVERY).max_train_steps == LONG + EVERY
    third.run()
    assert third.wait(120) == 0, "an old request stops nothing"
    assert TRAINING.trained(third.data) == [*range(LONG + 1, LONG + EVERY + 1)]
    assert third.lora() == Toy(LONG + EVERY, EVERY).expected()


@pytest.mark.slow
def test_a_store_that_fails_during_the_training_does_not_stop_it_and_a_second_stop_ends_the_last_copy(machine, address):
    one = running(machine, address, TRAINING)
    os.rename(address, f"{address}-gone")
    Path(address).write_text("not a folder")
    one.until(lambda: "copying the last files" in one.status().get("message", ""), "the last copy")
    assert one.status()["state"] == "stopping" and one.lora() == TRAINING.expected()
    one.until(lambda: "the LoRA" in (one.status()["store"]["pending"] or ""), "what is missing")
    shown = line(one.folder, read_status(one.folder))
    assert "stopping" in shown and ", store: cannot " in shown
    one.process.send_signal(signal.SIGINT)
    assert one.wait(60) == 0, "the training was complete"
    now = one.status()
    assert now["state"] == "completed" and "not in the store: " in now["reason"]
    assert f"the checkpoint of step {STEPS}" in now["reason"] and "the LoRA" in now["reason"]
    assert now["store"]["error"]
    assert 1 <= len(events(one.folder, "store_error")) <= 3, "once for each kind of error"


@pytest.mark.slow
def test_killed_agents_and_monitors_are_replaced_and_the_run_stays_one(machine, address):
    training = Toy(200, EVERY, step_s=0.03)
    one = copied(running(machine, address, training))
    killed = agent_of(one)
    psutil.Process(killed).kill()
    one.until(lambda: agent_of(one) not in (0, killed), "another agent")
    monitor = one.status()["monitor_pid"]
    second = agent_of(one)
    psutil.Process(monitor).kill()
    ended = lambda: not psutil.pid_exists(second) or psutil.Process(second).status() == "zombie"  # noqa: E731
    wait_for(ended, 20, "its agent's end")
    one.until(lambda: one.status()["monitor_pid"] != monitor, "another monitor")
    assert one.wait(120) == 0, one.output()
    trained = training.trained(one.data)
    assert trained == sorted(set(trained)), "the training went on all the time"
    assert finished(address, 200).lease == 1, "each agent takes on the claim of the one before"


def test_what_a_training_saves_while_nobody_watches_reaches_the_store(machine, address):
    one = copied(running(machine, address, Toy(120, EVERY, step_s=0.02)))
    for pid in (one.process.pid, one.status()["monitor_pid"]):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: (one.folder / "toy.safetensors").exists(), 60, "the end of the training")
    one.run()
    assert one.wait(120) == 0, one.output()
    finished(address, 120)


def test_what_ends_a_run_is_not_overwritten_by_another_thread_of_the_agent(tmp_path):
    report = Report(tmp_path, "1" * 16)
    report.set(lease=store.LeaseState.LOST, message="other (process 1) took the lease")
    report.set(lease=store.LeaseState.HELD, ready=True, message="the lease is held")
    values = json.loads((tmp_path / store.STORE).read_text())
    assert (values["lease"], values["ready"], values["message"]) == ("lost", False, "other (process 1) took the lease")
