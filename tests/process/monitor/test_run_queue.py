"""The queue: toy runs wait for a GPU (named by HANGPROOF_GPUS), and go on whatever is killed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from monitor_helpers import ROOT, events, members, status, step_of, toy_run, undisturbed, wait_for, weight

from monitor import run_queue
from monitor.cli import queue_worker
from monitor.process.locks import LOCK, Lock, is_held
from monitor.run_folder import MonitorError
from runs import manage


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data root with one GPU. At the end nothing of it is alive."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    monkeypatch.setenv("HANGPROOF_GPUS", "test")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    for name in [key for key in os.environ if key in ("HANGPROOF_RUN", "HANGPROOF_LIMITS")]:
        monkeypatch.delenv(name)
    yield tmp_path
    (tmp_path / "outputs" / run_queue.FILE).unlink(missing_ok=True)
    for process in processes(tmp_path):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def processes(data: Path, *words: str) -> list[psutil.Process]:
    """The living processes that work on this data root, and whose command line has all `words`."""
    found = []
    for process in psutil.process_iter():
        try:
            own = process.environ().get("HANGPROOF_DATA") == str(data) and process.pid != os.getpid()
            if own and process.status() != psutil.STATUS_ZOMBIE and set(words) <= {*process.cmdline()}:
                found.append(process)
        except psutil.Error:
            continue
    return found


def command(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "monitor", *words], cwd=ROOT, capture_output=True, text=True, timeout=90
    )


def made(data: Path, *names: str, steps: int = 12, **more) -> list[Path]:
    return [toy_run(data / "outputs" / name, steps=steps, **more) for name in names]


def ended(folder: Path, state: str = "completed") -> bool:
    return status(folder)["state"] == state and not is_held(folder / LOCK)


def starts(folder: Path) -> list[str]:
    """When attempts of this run were started."""
    return [event["t"] for event in events(folder) if event["kind"] in ("started", "restarted")]


def test_runs_are_trained_one_after_another_in_the_order_that_people_choose(data):
    first, second, third, broken = made(data, "first", "second", "third", "broken")
    (broken / "run.toml").write_text('name = "broken"\nmodel = "no-such-model"\n', encoding="utf-8")
    assert "position 1 in the queue" in command("queue", "add", "first").stdout
    assert "no-such-model" in command("queue", "add", "broken").stderr  # it is looked at at once
    run_queue.add(broken)  # and if it breaks while it waits, the others go on
    for name in ("second", "third"):
        queue_worker.add(data / "outputs" / name)
    run_queue.move("third", 1)
    wait_for(lambda: all(map(ended, (first, second, third))), what="three runs")
    assert starts(first) < starts(third) < starts(second)
    assert [len(starts(one)) for one in (first, second, third)] == [1, 1, 1]
    assert all(weight(one) == undisturbed(12) for one in (first, second, third))
    (left,) = run_queue.read().entries
    assert left.run == "broken" and "no-such-model" in left.problem
    wait_for(lambda: not processes(data, "work"), what="the end of the queue's process")
    assert run_queue.cancel("broken").run == "broken" and not run_queue.read().entries


@pytest.mark.long  # the browser's test does it too
def test_run_now_pauses_what_trains_and_continues_it_afterwards(data):
    long, waiting, urgent = made(data, "long", "waiting", "urgent", steps=25)
    queue_worker.add(long)
    wait_for(lambda: step_of(long) >= 2, what="two steps")
    assert queue_worker.start_or_wait(waiting) == {"position": 1, "pid": None}
    queue_worker.add(urgent)
    assert queue_worker.run_now("urgent") == ["long"]
    assert [entry.run for entry in run_queue.read().entries] == ["urgent", "long", "waiting"]
    wait_for(lambda: all(map(ended, (long, waiting, urgent))), what="three runs")
    assert all(weight(one) == undisturbed(25) for one in (long, waiting, urgent))
    kinds = [event["kind"] for event in events(long) if event["kind"] in ("paused", "completed")]
    assert kinds == ["paused", "completed"] and len(starts(long)) == 2
    assert starts(urgent)[0] < starts(long)[1] < starts(waiting)[0]


def test_a_queue_whose_process_is_stopped_goes_on_with_another(data, monkeypatch):
    first, second = made(data, "first", "second", steps=60)
    queue_worker.add(first)
    queue_worker.add(second)
    wait_for(lambda: step_of(first) >= 2, what="two steps")
    (stuck,) = processes(data, "work")
    stuck.send_signal(signal.SIGSTOP)
    assert not run_queue.ensure_worker(), "it has looked a moment ago"
    monkeypatch.setattr(run_queue, "WORKER_SILENT_S", 3.0)
    wait_for(run_queue.ensure_worker, what="another process")
    wait_for(lambda: all(map(ended, (first, second))), what="two runs")
    assert not stuck.is_running()


def test_what_was_started_before_a_kill_is_not_started_again(data):
    (run,) = made(data, "run")
    run_queue.add(run)
    assert queue_worker._take() == ("run", [])
    assert queue_worker._start(run) == ""
    wait_for(lambda: ended(run), what="the run")
    (run / "run.safetensors").unlink()  # so that a second start would train again
    command("queue", "work")  # the process that took it was killed here
    assert not run_queue.read().entries and len(starts(run)) == 1
    # Taken, and killed before the start: it is started now.
    (other,) = made(data, "other")
    run_queue.add(other)
    assert queue_worker._take() == ("other", [])
    time.sleep(0.05)
    command("queue", "work")
    wait_for(lambda: ended(other), what="the other run")
    assert len(starts(other)) == 1


def test_many_who_change_the_queue_at_once_lose_nothing(data):
    names = [f"run-{n}" for n in range(12)]
    for folder in made(data, *names):
        run_queue.add(folder)
    draw = random.Random(1)

    def change(seed):
        own = random.Random(seed)
        for _ in range(15):
            run_queue.move(own.choice(names[:-2]), own.randint(1, 12))

    with ThreadPoolExecutor(4) as pool:  # flock is per open file, so threads exclude each other as processes do
        list(pool.map(change, [draw.random() for _ in range(4)]))
        assert run_queue.cancel("run-10").run == "run-10"
    assert sorted(entry.run for entry in run_queue.read().entries) == sorted(set(names) - {"run-10"})
    with pytest.raises(MonitorError, match="run-10 is not in the queue"):
        run_queue.move("run-10", 1)


def test_two_who_move_different_runs_both_get_what_they_asked_for(data):
    for folder in made(data, "a", "b", "c", "d"):
        run_queue.add(folder)
    run_queue.move("d", 1)
    run_queue.move("a", 4)  # from a page that shows the order before
    assert [entry.run for entry in run_queue.read().entries] == ["d", "b", "c", "a"]


def test_deleted_renamed_and_foreign_entries(data):
    from monitor.process.tree import idle

    a, b, c = made(data, "a", "b", "c")
    for folder in (a, b, c):
        run_queue.add(folder)
    (a / "run.toml").write_text('name = "a"\n', encoding="utf-8")
    manage.delete("a", idle)
    run_queue.rename("b", "new name")
    os.rename(b, data / "outputs" / "new name")
    run_queue.forget("b")
    run_queue.forget("a")  # so that a new run of this name does not inherit its place
    assert [entry.run for entry in run_queue.read().entries] == ["new name", "c"]
    lock = Lock(c / LOCK)
    assert lock.acquire()  # somebody started it by hand
    assert queue_worker._take()[1] == [c]  # the renamed one waits for it
    assert [entry.run for entry in run_queue.read().entries] == ["new name"]
    lock.release()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"entries": 5}', '{"entries": [{"run": "../x"}, {"run": 5}, {"x": 1}, 7], "taken": 3}']
)
def test_a_damaged_queue_is_an_empty_one(data, text):
    (data / "outputs").mkdir()
    (data / "outputs" / run_queue.FILE).write_text(text, encoding="utf-8")
    assert run_queue.read() == run_queue.Queue()
    (folder,) = made(data, "a")
    assert run_queue.add(folder) == 1


@pytest.mark.long
def test_a_run_without_a_gpu_starts_at_once_and_one_with_a_gpu_waits(data, monkeypatch):
    busy, other = made(data, "busy", "other", steps=200)
    queue_worker.start_or_wait(busy)
    wait_for(lambda: step_of(busy) >= 1, what="a step")
    assert queue_worker.start_or_wait(other)["position"] == 1
    assert queue_worker.start_or_wait(other)["position"] == 1  # asked twice
    run_queue.cancel("other")
    monkeypatch.setenv("HANGPROOF_GPUS", "")
    assert queue_worker.start_or_wait(other)["pid"]
    for name in ("busy", "other"):
        assert command("stop", name, "--wait", "60").returncode == 0


def chaos(data: Path, seed: int, runs: int, kills: int) -> None:
    """Kill the queue's process, monitors, keepers and trainings at random moments; every run ends right, started once a time."""
    draw = random.Random(seed)
    folders = made(data, *(f"run-{n}" for n in range(runs)), steps=40)
    for folder in folders:
        queue_worker.add(folder)
    done = 0
    until = time.monotonic() + 300
    while not all(_is_done(folder) for folder in folders):
        assert time.monotonic() < until, [status(f) if (f / "status.json").exists() else f for f in folders]
        time.sleep(draw.uniform(0.1, 1.0))
        alive = [folder for folder in folders if members(folder)]
        assert len(alive) <= 1, f"two trainings at once: {alive}"
        if done < kills:
            kind = draw.choice(("work", "work", "--child", "toy.py"))
            victims = processes(data, kind)
            for victim in victims[:1]:
                victim.kill()
                done += 1
        elif not processes(data, "work"):
            command("resume-all")  # what a reboot, or the page, does
    assert all(weight(folder) == undisturbed(40) for folder in folders)
    for folder in folders:
        assert [event["kind"] for event in events(folder)].count("completed") == 1


def _is_done(folder: Path) -> bool:
    try:
        return ended(folder)
    except (OSError, ValueError):
        return False


@pytest.mark.timeout(400)
def test_kills_of_the_queue_and_of_monitors_lose_nothing_and_start_nothing_twice(data):
    chaos(data, seed=3, runs=2, kills=4)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(5))
def test_many_kills(data, seed):
    chaos(data, seed=seed, runs=6, kills=20)


def test_a_sweep_is_one_entry_that_starts_its_runs_in_turn(data):
    a, b, other = made(data, "base-a", "base-b", "other")
    run_queue.add_sweep("base", ["base-a", "base-b"])
    queue_worker.add(other)
    wait_for(lambda: all(map(ended, (a, b, other))), what="three runs")
    assert starts(a) < starts(b) < starts(other)
    assert json.loads(command("queue", "--json").stdout.splitlines()[-1]) == []
