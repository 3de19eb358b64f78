"""What the agent reports and exchanges; a run with a store as real processes: keeper, monitor, agent and a toy trainer."""

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from machines import Machine, Toy
from monitor_helpers import events, wait_for
from PIL import Image
from run_facts import step_of
from store_helpers import QUICK, add_state, held, make_run

import runs
from launch.store import agent, copies
from launch.store.lease import HELD, LOST, UNREACHABLE, WAITING, current
from launch.store.places import NotFound, Refused, StoreError, Unavailable, open_place
from monitor import config, store
from monitor.cli.commands import line
from monitor.run_folder import STATUS, STOP
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
    training = Toy(400, EVERY, step_s=0.03)
    one = copied(running(machine, address, training))
    killed = agent_of(one)
    os.rename(address, f"{address}-gone")
    Path(address).write_text("a store that refuses, as one whose login has expired")
    psutil.Process(killed).kill()
    values = lambda: json.loads((one.folder / store.STORE).read_text())  # noqa: E731
    one.until(lambda: values()["pid"] != killed and values()["error"], "another agent, which is refused")
    os.unlink(address)
    os.rename(f"{address}-gone", address)
    one.until(lambda: agent_of(one) not in (0, killed), "its lease")
    monitor = one.status()["monitor_pid"]
    second = agent_of(one)
    psutil.Process(monitor).kill()
    ended = lambda: not psutil.pid_exists(second) or psutil.Process(second).status() == "zombie"  # noqa: E731
    wait_for(ended, 20, "its agent's end")
    one.until(lambda: one.status()["monitor_pid"] != monitor, "another monitor")
    assert one.wait(120) == 0, one.output()
    trained = training.trained(one.data)
    assert trained == sorted(set(trained)), "the training went on all the time"
    assert finished(address, 400).lease == 1, "each agent takes on the claim of the one before"


def test_what_a_training_saves_while_nobody_watches_reaches_the_store(machine, address):
    one = copied(running(machine, address, Toy(120, EVERY, step_s=0.02)))
    for pid in (one.process.pid, one.status()["monitor_pid"]):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: (one.folder / "toy.safetensors").exists(), 60, "the end of the training")
    one.run()
    assert one.wait(120) == 0, one.output()
    finished(address, 120)


def test_what_ends_a_run_is_not_overwritten_by_another_thread_and_is_written_once_the_disk_has_space(tmp_path):
    report = agent.Report(tmp_path, "1" * 16)
    report._path = tmp_path / "no folder" / store.STORE
    report.set(lease=store.LeaseState.LOST, message="other (process 1) took the lease")
    report._path = tmp_path / store.STORE
    report.set(lease=store.LeaseState.HELD, ready=True, message="the lease is held")
    values = json.loads((tmp_path / store.STORE).read_text())
    assert (values["lease"], values["ready"], values["message"]) == ("lost", False, "other (process 1) took the lease")


@pytest.fixture
def one(data, tmp_path, monkeypatch) -> agent.Agent:
    """The agent of a run whose store is a folder."""
    folder, limits = make_run(tmp_path), config.load().store
    place, limits.lease_s = open_place(str(tmp_path / "store"), QUICK).under(folder.name), 0.0
    monkeypatch.setattr(agent, "RETRY_S", 0.0)
    monkeypatch.setattr(agent, "POLL_S", 0.01)
    lease = Mock(state="held", holder="far (process 7)", error="", seen_alive=False)
    lease.valid = lambda: lease.state == "held"
    return agent.Agent(folder, place, place, lease, agent.Report(folder, "1" * 16), limits, adopted=False)


def values(one: agent.Agent) -> dict:
    return json.loads((one.folder / store.STORE).read_text())


@pytest.mark.parametrize("final", [False, True])
def test_a_copy_that_fails_is_reported_and_the_error_goes_with_the_next_one_that_succeeds(one, monkeypatch, final):
    seen = []

    def push(progress):
        seen.append(values(one)["error"])
        if len(seen) == 1:
            raise StoreError("the store is full")
        one.final = True  # the end of the run
        return SimpleNamespace(notes=["it changed while it was sent", "not copied: a:b.png"], manifest=None)

    monkeypatch.setattr(agent, "Copier", lambda *_: SimpleNamespace(last=None, push=push))
    one.adopted, one.final = True, final
    one.held.set()
    one.copy()
    assert seen[:2] == ([""] if final else ["", "the store is full"])
    assert values(one)["error"] == ("the store is full" if final else "not copied: a:b.png"), "the last is not repeated"


@pytest.mark.parametrize(
    ("state", "more", "lease", "said"),
    [
        (LOST, {}, "lost", "far (process 7) took the lease of this run"),
        (WAITING, {"seen_alive": True}, "refused", "far (process 7) trains this run. Stop it there"),
        (WAITING, {"seen_alive": True, "adopted": True}, "lost", "took the lease"),
        (WAITING, {"seen_alive": True, "lease_s": 100.0}, "waiting", "its lease expires within 125 s"),
        (WAITING, {}, "waiting", "far (process 7) holds the lease of this run; finding out"),
        (WAITING, {"error": "no route"}, "connecting", "connecting to "),
        (HELD, {}, "held", "the lease is held"),
        (UNREACHABLE, {"error": "no route"}, "connecting", "connecting to the store"),
    ],
)
def test_what_is_said_of_the_lease(one, state, more, lease, said):
    for name, value in more.items():
        setattr({"adopted": one, "lease_s": one.limits}.get(name, one.lease), name, value)
    one.lease.poll = lambda: one.released.set() or state
    (one.folder / STATUS).write_text("{}")
    one.keep_lease()
    found = values(one)
    assert found["lease"] == lease and said in found["message"] and not found["ready"]
    assert found["reachable"] == (lease in ("held", "waiting") or "holder" in more)
    assert found["error"] == more.get("error", "") and found["holder"] in ("", one.lease.holder)
    assert one.held.is_set() == bool(one.place.list()) == (state == HELD), "the status is copied"


def test_the_first_copy_waits_for_the_lease_and_the_last_gives_it_back(one, monkeypatch):
    thread = Mock(join=lambda limit_s: (add_state(one.folder, 5), one.held.set(), one.copy()))
    (one.folder / STATUS).write_text('{"state": "completed"}')
    one.lease = held(one.place)
    one.release(thread, Mock(), 0.0)
    found = values(one)
    assert (found["lease"], found["message"]) == ("connecting", "the lease was given back") and one.released.is_set()
    assert not one.lease.valid() and one.place.read(STATUS) == b'{"state": "completed"}'
    assert (found["ready"], found["step"], found["pending"], found["pending_bytes"]) == (False, None, "", 0)
    one.final, one.released = False, threading.Event()
    one.lease = held(one.place)
    wait = lambda seconds: setattr(one, "final", values(one)["step"] == 5)  # noqa: E731
    monkeypatch.setattr(one, "wake", Mock(wait=wait))
    one.copy()
    found = values(one)
    assert (found["ready"], found["step"], found["pending"]) == (True, 5, "") and one.copier.last.step == 5
    one.lease, one.final = Mock(state=LOST, valid=lambda: False, holder=""), False
    one.copy()
    assert values(one)["error"] == "", "the one who took the lease is reported elsewhere"


def test_a_renewal_under_way_does_not_undo_the_release(one):
    one.lease, under_way = held(one.place), threading.Event()
    put = one.lease.place.put

    def slow_once(name, data):
        if not under_way.is_set():
            under_way.set()
            time.sleep(1)
        put(name, data)

    one.lease.place.put = slow_once
    keeping = threading.Thread(target=one.keep_lease)
    keeping.start()
    under_way.wait()
    one.release(Mock(), keeping, time.monotonic() + 60)
    keeping.join()
    assert current(one.place).released


@pytest.mark.parametrize("sent, now", [(b'{"now": true}', True), (b'{"now": 1}', False), (b"[", False), (b"[]", False)])
def test_a_stop_through_the_store_is_handed_on_once(one, monkeypatch, sent, now):
    with pytest.raises(NotFound):
        one.fetch_request()
    one.place.put(agent.REQUEST, sent)
    with monkeypatch.context() as full:
        full.setattr(agent.checkpoint, "atomic_write", Mock(side_effect=OSError(28, "No space left")))
        one.fetch_request()
    assert one.place.list("requests"), "it is not lost: the disk here may have space again"
    for handed in (True, False):
        one.place.put(agent.REQUEST, sent)
        one.fetch_request()
        assert not one.place.list("requests") and (one.folder / STOP).is_file() == handed
        assert not handed or json.loads((one.folder / STOP).read_text()) == {"now": now}
        (one.folder / STOP).unlink(missing_ok=True)


def test_a_status_is_sent_when_it_changed_and_while_the_lease_is_held(one):
    one.send_status()
    (one.folder / STATUS).write_text("1")
    one.lease.state = "lost"
    one.send_status()
    assert not one.place.list()
    one.lease.state = "held"
    one.send_status()
    one.place.delete([STATUS])
    one.send_status()
    assert not one.place.list(), "nothing new"
    (one.folder / STATUS).write_text("2")
    one.send_status()
    assert one.place.read(STATUS) == b"2"


def test_what_the_store_lacks_is_named_and_a_new_checkpoint_or_lora_is_seen(one):
    assert one.pending() == "" and one.signature() == []
    add_state(one.folder, 5), add_state(one.folder, 12)
    lora = one.folder / f"{one.folder.name}.safetensors"
    lora.write_bytes(b"1")
    assert one.pending() == "the checkpoint of step 12, the LoRA" and len(one.signature()) == 3
    one.copier = copies.Copier(one.place, one.folder, held(one.place))
    one.copier.push()
    add_state(one.folder, 20)
    assert one.pending() == "the checkpoint of step 20" and len(one.signature()) == 4
    one.orders = 3
    one.progress(10, 30, (3, False))
    assert (values(one)["pending"], values(one)["pending_bytes"]) == ("the checkpoint of step 20", 20)
    with pytest.raises(agent.Superseded):
        one.progress(10, 30, (2, False))


def test_a_restore_is_tried_again_until_it_cannot_succeed(one, monkeypatch, capsys):
    errors, fetched_mb = [Unavailable("busy"), NotFound("gone")], 1

    def restore(place, folder, on_progress):
        on_progress(fetched_mb * 1_000_000, 3_000_000)
        assert f"restoring from the store: {fetched_mb} of 3 MB" in values(one)["message"]
        time.sleep(0.01)
        if errors:
            raise errors.pop(0)
        return SimpleNamespace(notes=["a note"], files=2, step=7, damaged={"x"}, manifest=SimpleNamespace(owner="far"))

    monkeypatch.setattr(agent, "restore", restore)
    assert one.retried_restore() == {"x"} and "store: a note" in capsys.readouterr().err
    found = values(one)
    assert (found["restored_step"], found["restored_from"], found["error"]) == (7, "far", "gone")
    errors, one.final = [Unavailable("busy")], True
    assert one.retried_restore() is None and errors, "the run ends first"
    one.final, one.limits.connect_s = False, 0.0
    assert one.retried_restore() is None and values(one)["lease"] == "unusable", "late"
    one.report, one.limits.connect_s, errors = agent.Report(one.folder, ""), 1e6, [Refused("another run")]
    assert one.retried_restore() is None and values(one)["message"] == "another run"
    one.report, one.limits.connect_s, fetched_mb = agent.Report(one.folder, ""), 0.03, 0
    errors = [*[Unavailable("busy")] * 20, Refused("tried for ever")]
    assert one.retried_restore() is None and values(one)["message"] == "busy", "nothing more arrives"
