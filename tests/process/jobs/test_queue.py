"""The queue: toy runs wait for a GPU (named by HANGPROOF_GPUS), and go on whatever is killed."""

import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from monitor_helpers import events, toy_run, wait_for
from queue_helpers import command, ended, made, processes, starts
from run_facts import step_of, weight
from sweep_helpers import make
from toys import undisturbed

import runs
from jobs import queue
from monitor.process.platform import LOCK, Lock, is_held
from monitor.process.spawned import idle
from monitor.run_folder import MonitorError
from runs import manage


@pytest.mark.slow
def test_runs_are_trained_one_after_another_in_the_order_that_people_choose(data):
    first, second, third, broken = made(data, "first", "second", "third", "broken")
    (broken / "run.toml").write_text('name = "broken"\nmodel = "no-such-model"\n', encoding="utf-8")
    assert "position 1 in the queue" in command("jobs", "queue", "add", "first").stdout
    assert "no-such-model" in command("jobs", "queue", "add", "broken").stderr  # it is looked at at once
    queue.insert(broken)  # and if it breaks while it waits, the others go on
    for name in ("second", "third"):
        queue.add(data / "outputs" / name)
    queue.move("third", 1)
    wait_for(lambda: all(map(ended, (first, second, third))), what="three runs")
    assert starts(first) < starts(third) < starts(second)
    assert [len(starts(one)) for one in (first, second, third)] == [1, 1, 1]
    assert all(weight(one) == undisturbed(12) for one in (first, second, third))
    (left,) = queue.read().entries
    assert left.run == "broken" and "no-such-model" in left.problem
    wait_for(lambda: not processes(data, "work"), what="the end of the queue's process")
    assert queue.remove("broken").run == "broken" and not queue.read().entries


def test_many_who_change_the_queue_at_once_lose_nothing(data):
    names = [f"run-{n}" for n in range(12)]
    for folder in made(data, *names):
        queue.insert(folder)

    def change(seed):
        own = random.Random(seed)
        for _ in range(15):
            queue.move(own.choice(names[:-2]), own.randint(1, 12))

    with ThreadPoolExecutor(4) as pool:  # flock is per open file, so threads exclude each other as processes do
        list(pool.map(change, range(4)))
        assert queue.remove("run-10").run == "run-10"
    assert sorted(waiting()) == sorted(set(names) - {"run-10"})
    with pytest.raises(MonitorError, match="run-10 is not in the queue"):
        queue.move("run-10", 1)


def written(run: Path, ahead_s: float) -> None:
    (run / "status.json").write_text("{}")
    os.utime(run / "status.json", (time.time() + ahead_s,) * 2)


def waiting() -> list[str]:
    return [entry.run for entry in queue.read().entries]


def test_moved_deleted_and_foreign_entries(data):
    a, _, c, _ = folders = made(data, "a", "b", "c", "d")
    for folder in folders:
        queue.insert(folder)
    queue.move("d", 1)
    queue.move("a", 4)  # from a page that shows the order before
    assert waiting() == ["d", "b", "c", "a"]
    queue.remove("d")
    (a / "run.toml").write_text('name = "a"\n', encoding="utf-8")
    manage.delete("a", idle)
    queue.forget("a")  # so that a new run of this name does not inherit its place
    assert waiting() == ["b", "c"]
    lock = Lock(c / LOCK)
    assert lock.acquire()  # somebody started it by hand
    assert queue._take() == "" and not queue.next_can_start()  # b waits for it
    assert waiting() == ["b"]
    lock.release()


def test_a_run_that_could_not_be_started_waits_again_once_it_is_added_again(data, monkeypatch):
    first, second = made(data, "first", "second")
    monkeypatch.setattr(queue, "ensure_worker", lambda: None)
    with queue.changing() as changed:
        changed.entries = [queue.Entry("first", problem="no model"), queue.Entry("second", after_pause=True)]
    (second / "status.json").write_text('{"state": "failed"}')  # it failed instead of pausing
    assert [queue.add(first), queue.add(second)] == [1, 2]
    assert queue._take() == "first" and waiting() == ["first", "second"]


def test_a_run_elsewhere_does_not_vanish_from_the_queue(data, monkeypatch):
    elsewhere = toy_run(data / "my run")
    with pytest.raises(MonitorError, match="is not one of them; start it with `python -m monitor start '.*/my run'`"):
        queue.add(elsewhere)
    monkeypatch.setattr(queue, "busy", lambda folder: ["another"])
    monkeypatch.setattr(queue, "launch", lambda folder: {"pid": 7})
    assert queue.start_or_wait(elsewhere) == {"position": None, "pid": 7}, "its monitor waits for the GPU"
    (data / "outputs").mkdir()
    (data / "outputs" / "my run").symlink_to(elsewhere)
    assert queue.insert(elsewhere) == 1


def test_a_damaged_queue_is_an_empty_one(data, monkeypatch):
    (folder,) = made(data, "a")
    entries = '[{"run": "../x"}, {"run": 5}, {"run": "a", "sweep": 5}, {"run": "a", "total": "x"}, {"x": 1}, 7]'
    wrong = f'{{"entries": {entries}, "taken": 3}}'
    for text in ("", "{", '{"entries": 5}', wrong):
        (data / "outputs" / queue.FILE).write_text(text, encoding="utf-8")
        assert queue.read() == queue.Queue()
        assert queue.insert(folder) == 1
    (data / "outputs" / queue.FILE).unlink()
    (data / "outputs" / queue.FILE).mkdir()  # stands for one that cannot be read now: the runs that wait are not lost
    with pytest.raises(OSError), queue.changing():
        pytest.fail("it is changed as if no run waited")
    (data / "outputs" / queue.FILE).rmdir()
    queue.insert(folder)
    monkeypatch.setattr(queue, "read_json", lambda path: None)  # the drive fails between two reads
    assert queue.insert(made(data, "b")[0]) == 2


@pytest.mark.slow
def test_what_was_started_before_a_kill_is_not_started_again(data):
    (run,) = made(data, "run")
    queue.insert(run)
    assert queue._take() == "run"
    assert queue._start(run) == ""
    wait_for(lambda: ended(run), what="the run")
    (run / "run.safetensors").unlink()  # so that a second start would train again
    command("jobs", "queue", "work")  # the process that took it was killed here
    assert not queue.read().entries and len(starts(run)) == 1
    # Taken, and not started, by a process that was killed or, with its lock, is left from before an update: it is now.
    (other,) = made(data, "other")
    queue.insert(other)
    assert queue._take() == "other"
    older = Lock(data / "outputs" / ".queue-worker.lock")
    assert older.acquire()
    command("jobs", "queue", "work")
    older.release()
    wait_for(lambda: ended(other), what="the other run")
    assert len(starts(other)) == 1


@pytest.mark.parametrize("ahead_s", [None, -3600, 3600])  # an earlier status, by the clock of a network drive
def test_a_look_at_a_busy_gpu_keeps_the_note_of_what_is_being_started(data, ahead_s):
    run, other = made(data, "run", "other")
    queue.insert(run)
    if ahead_s is not None:
        written(run, ahead_s)
    assert queue._take() == "run"  # the process that took it was killed here, before the monitor had its lock
    lock = Lock(other / LOCK)
    assert lock.acquire()
    assert queue._take() == "" and queue.read().taken == "run"
    written(run, (ahead_s or 0) + 1)  # the monitor's first act
    lock.release()
    assert queue._take() == "" and queue.read() == queue.Queue()


def test_a_run_waits_for_those_on_its_own_gpu_and_now_pauses_no_other(data, monkeypatch):
    here, there, waits = made(data, "here", "there", "waits")
    held = [Lock(folder / LOCK) for folder in (here, there)]
    assert all(lock.acquire() for lock in held)
    for folder, gpus in ((here, '["test"]'), (there, '["1"]')):  # `HANGPROOF_GPUS=1 python -m monitor start there`
        (folder / "status.json").write_text(f'{{"state": "running", "devices": {gpus}}}')
    assert queue.busy(waits) == ["here"]
    queue.insert(waits)
    monkeypatch.setattr(queue, "ensure_worker", lambda: None)
    assert queue.run_now("waits") == ["here"] and not (there / "stop.request").exists()
    held[0].release()
    assert queue._take() == "waits"
    held[1].release()


@pytest.mark.slow
def test_a_training_that_lost_its_monitor_and_its_keeper_is_watched_again_before_the_next_one_starts(data):
    """Else the next one waits for its GPU: for ever, when it hangs."""
    (lost,), (following,) = made(data, "lost", steps=5000), made(data, "following")
    queue.start_or_wait(lost)
    wait_for(lambda: step_of(lost) >= 1, what="a step")
    queue.insert(following)
    for process in [*processes(data, "--keep"), *processes(data, "--child")]:
        process.kill()
    wait_for(lambda: not is_held(lost / LOCK), what="the end of the monitor")
    assert queue.ensure_worker()
    wait_for(lambda: len(events(lost, "started")) == 2, what="another monitor")
    assert "adopted" in events(lost, "started")[1]["message"] and not starts(following)
    assert command("monitor", "stop", "lost", "--wait", "60").returncode == 0
    wait_for(lambda: ended(following), what="the next run")


@pytest.mark.parametrize(("state", "keeper", "adopted"), [("running", 0, 1), ("running", 1, 0), ("completed", 0, 0)])
def test_what_has_its_keeper_or_has_ended_is_not_watched_again(data, monkeypatch, state, keeper, adopted):
    """A keeper that finds another monitor ends, with the Slurm job that it is; an ended run may leave a TensorBoard."""
    (run,) = made(data, "run")
    launched = []
    (run / "status.json").write_text(json.dumps({"state": state, "keeper_pid": os.getpid() if keeper else None}))
    monkeypatch.setattr(queue, "unwatched", lambda: [(None, run), (None, run), (None, data / "elsewhere")])
    monkeypatch.setattr(queue, "launch", lambda folder, how: launched.append(how))
    queue.advance()
    assert launched == ["resume"] * adopted


@pytest.mark.slow
def test_a_run_that_is_cancelled_while_it_is_being_started_is_stopped(data, monkeypatch):
    (run,) = made(data, "run", steps=5000)
    queue.insert(run)
    launch = queue.launch
    monkeypatch.setattr(queue, "launch", lambda folder: queue.cancel("run") or launch(folder))
    queue.advance()
    wait_for(lambda: ended(run, "stopped"), what="the end of the run")


@pytest.mark.slow
def test_a_run_without_a_gpu_starts_at_once_and_one_with_a_gpu_waits(data, monkeypatch):
    busy, other = made(data, "busy", "other", steps=5000)
    queue.start_or_wait(busy)
    wait_for(lambda: step_of(busy) >= 1, what="a step")
    assert queue.start_or_wait(other)["position"] == 1
    assert queue.start_or_wait(other)["position"] == 1  # asked twice
    queue.remove("other")
    with monkeypatch.context() as race:  # its training is watched again while it is being added
        its = Lock(other / LOCK)
        race.setattr(queue, "refuse_unready", lambda *_: its.acquire())
        assert queue.start_or_wait(other)["position"] is None and not queue.read().entries
        its.release()
    monkeypatch.setenv("HANGPROOF_GPUS", "")
    first, second = ThreadPoolExecutor(2).map(queue.start_or_wait, [other, other])  # from two tabs at the same moment
    assert first["pid"] and first == second
    for name in ("busy", "other"):
        assert command("monitor", "stop", name, "--wait", "60").returncode == 0


def test_cancelling_a_sweep_removes_what_is_left(base):
    made = make(base, rank=[4, 8])
    queue.add_sweep(made)
    assert queue.cancel(made.name) == [] and not queue.read().entries
    with pytest.raises(MonitorError, match="none of its runs waits or trains"):
        queue.cancel(made.name)


def test_a_run_of_a_sweep_starts_with_the_caches_of_those_before_it(base, monkeypatch):
    first, second = (run for run, _ in make(base, rank=[4, 8]).runs)
    (runs.datasets_dir() / first / "0_flux.npz").write_bytes(b"cache")
    started = []
    monkeypatch.setattr(queue, "launch", lambda folder: started.append((folder.name, len(list(data.glob("*.npz"))))))
    data = runs.datasets_dir() / second
    assert queue._start(runs.outputs_dir() / second) == "" and started == [(second, 1)]
