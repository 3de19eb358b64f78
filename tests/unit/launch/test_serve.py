"""When a rented machine has nothing left to do, and what the container's log says then."""

import itertools
import json
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from launch import serve
from launch.common import LaunchError
from launch.serve import GRACE_S, IDLE_S, Container, Idle
from runs.files import RunError


def runs(**states: str) -> tuple[dict[str, str], set[str]]:
    """Runs by state; those in capitals are under way."""
    return {n: s.lower() for n, s in states.items()}, {n for n, s in states.items() if s.isupper()}


TRAINS = (0.0, runs(a="RUNNING"))
DONE, STOPPED = runs(a="completed"), runs(a="stopped")
NEXT_STARTS = runs(a="completed", b="STARTING")
ALONE, OTHER, LAST = runs(a="running"), runs(a="stopped", b="RUNNING"), runs(a="stopped", b="failed")
B = runs(b="completed")  # a was deleted


@pytest.mark.parametrize(
    ("rule", "moments", "stops"),
    [
        *[  # a minute after its last run has ended
            ("1", (TRAINS, (10.0, runs(a=end)), (9.0 + GRACE_S, runs(a=end)), (11.0 + GRACE_S, runs(a=end))), True)
            for end in ("completed", "failed", "preempted", "unkillable")
        ],
        ("", (TRAINS, (10.0, DONE), (1e6, DONE)), False),
        ("1", ((0.0, runs(a="RUNNING", b="completed")), (1e6, runs(a="RUNNING", b="completed"))), False),
        ("1", (TRAINS, (10.0, ALONE), (9.0 + IDLE_S, ALONE), (9.9 + IDLE_S, ALONE)), False),  # started again
        ("1", (TRAINS, (10.0, ALONE), (11.0 + IDLE_S, ALONE), (12.0 + IDLE_S + GRACE_S, ALONE)), True),  # in vain
        ("1", (TRAINS, (10.0, DONE), (60.0, NEXT_STARTS), (120.0, runs(a="completed", b="failed"))), False),
        ("1", (TRAINS, (10.0, STOPPED), (9.0 + IDLE_S, STOPPED), (11.0 + IDLE_S, STOPPED)), True),  # by the user
        ("1", (TRAINS, (10.0, STOPPED), (20.0, OTHER), (30.0, LAST), (31.0 + GRACE_S, LAST)), True),  # and another ran
        ("1", (TRAINS, (10.0, DONE), (20.0, runs()), (30.0, runs(b="RUNNING")), (40.0, B), (41.0 + GRACE_S, B)), True),
        ("always", (TRAINS, (10.0, STOPPED), (1e6, STOPPED)), True),
        ("1", ((0.0, DONE), (IDLE_S - 1, DONE), (IDLE_S + 1, DONE)), True),  # started for a finished run
    ],
)
def test_when_a_pod_stops(rule, moments, stops):
    idle = Idle(rule)
    *before, last = [bool(idle.reason(*now, at_s, False)) for at_s, now in moments]
    assert not any(before) and last == stops


def test_a_pod_waits_for_its_run_and_stops_a_minute_after_it_could_not_be_started():
    idle = Idle("1", failed="cat cannot be started")
    assert not idle.reason(*runs(), 0.0, True) and not idle.reason(*runs(), -1e6, True)
    assert not idle.reason(*runs(), 0.0, False)
    assert "cat cannot be started" in idle.reason(*runs(), GRACE_S + 1, False)


def test_a_run_whose_monitor_and_keeper_are_gone_is_continued_after_a_minute_and_again(data, monkeypatch, capsys):
    monkeypatch.setattr(serve, "python", command(data / "log"))
    container = Container(1, {"PATH": os.environ["PATH"]})
    for at_s, state in ((0, "RUNNING"), *((after_s, "running") for after_s in (5, 60, 66, 67, 130))):
        now = SimpleNamespace(monotonic=lambda at_s=at_s: 1000.0 + at_s)
        monkeypatch.setattr(serve, "time", now)
        monkeypatch.setattr(serve, "observe", lambda state=state: runs(cat=state))
        container._look()
    assert capsys.readouterr().err.count("cat: its monitor is gone; starting it again") == 2
    while len(asked := (data / "log").read_text().splitlines() if (data / "log").exists() else []) < 2:
        time.sleep(0.01)
    assert asked == [START, START]


def test_runs_that_wait_are_looked_for_once_when_the_last_one_has_ended(data, monkeypatch):
    """The process of the queue may have been killed in that moment, and the pod would be stopped."""
    woken, container = [], Container(1, {serve.STOP_POD: "1"})
    monkeypatch.setattr(serve, "wake_queue", woken.append)
    for now, times in ((TRAINS[1], 0), (DONE, 1), (DONE, 1), (NEXT_STARTS, 1), (DONE, 2)):
        monkeypatch.setattr(serve, "observe", lambda now=now: now)
        container._look()
        assert woken == [data / "outputs"] * times


def test_a_wrong_variable_is_reported():
    for rule, kept in (("", ""), ("0", ""), ("1", "1"), ("always", "always")):
        assert Container(1, {"HANGPROOF_STOP_POD": rule}).idle.rule == kept
    for wrong in ({"HANGPROOF_STOP_POD": "yes"}, {"HANGPROOF_STOP_AFTER_S": "soon"}, {"HANGPROOF_STOP_AFTER_S": "-1"}):
        with pytest.raises(LaunchError, match=next(iter(wrong))):
            Container(1, wrong)


def test_a_signal_ends_the_loop_of_the_container_and_no_error_does(data, monkeypatch, capsys):
    handlers = {}
    monkeypatch.setattr(serve.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(serve, "POLL_S", 0.0)
    monkeypatch.setattr(serve.subprocess, "run", lambda *words, **more: None)
    monkeypatch.setattr(Container, "_keep_page", lambda container: handlers[signal.SIGTERM](signal.SIGTERM, None))
    monkeypatch.setattr(Container, "_look", lambda container: 1 / 0)
    monkeypatch.setattr(serve, "PAGE_PAUSE_S", 0.0)
    monkeypatch.setattr(Container, "leave", lambda container: container.signals)
    assert Container(1, {}).serve() == [signal.SIGTERM] and "ZeroDivisionError" in capsys.readouterr().err
    assert set(handlers) == {signal.SIGTERM, signal.SIGINT}


@pytest.mark.parametrize("rule", ["1", ""])
def test_a_pod_whose_disk_cannot_be_written_stops_itself(data, monkeypatch, capsys, rule):
    (data / "outputs").write_text("in place of the folder")
    monkeypatch.setattr(serve.signal, "signal", lambda *given: None)
    monkeypatch.setattr(serve.rent, "stop", lambda pod, key: f"pod {pod} stops")
    assert Container(1, {"RUNPOD_POD_ID": "p1", "RUNPOD_API_KEY": "k", serve.STOP_POD: rule}).serve() == 1
    said = capsys.readouterr().err
    assert "--build-arg USER_ID=NUMBER" in said and ("pod p1 stops" in said) == bool(rule)


def command(log, **codes):
    """In place of `python -m WORDS`: writes its words to `log`, and exits with the code of the first that is named."""

    def python(*words: str) -> list[str]:
        code = next((codes[word] for word in words if word in codes), 0)
        return ["sh", "-c", f'echo "$@" >> {log}; exit {code}', "sh", *words]

    return python


PREPARE, START = "launch train --prepare cat", "monitor start cat"


@pytest.mark.parametrize(
    ("known", "store", "codes", "asked", "failed"),
    [
        (False, "s3://b/x", {}, ["launch store restore s3://b/x cat", PREPARE, START], ""),
        (False, "", {"start": 1}, [PREPARE, START], "cat cannot be started"),
        (True, "", {"train": 1}, [PREPARE] * 5, "cat cannot be prepared, tried 5 times in 0 minutes"),
        (False, "hang", {"store": 1}, ["launch store restore hang cat"] * 3, "cat cannot be fetched, tried 3 times in 15 minutes"),
    ],
)  # fmt: skip
def test_a_run_is_started_and_what_fails_is_tried_again(data, monkeypatch, capsys, known, store, codes, asked, failed):
    if known:
        (data / "outputs" / "cat").mkdir(parents=True)
        (data / "outputs" / "cat" / "run.toml").write_text("")
    monkeypatch.setattr(serve, "python", command(data / "log", **codes))
    monkeypatch.setattr(serve, "PAUSE_S", 0.0)
    monkeypatch.setattr(serve, "TRIES", 5)
    minutes = itertools.count(step=300.0) if store == "hang" else itertools.repeat(0.0)
    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: next(minutes), sleep=time.sleep))
    container = Container(1, {serve.STARTED: "cat", serve.STORE: store, "PATH": os.environ["PATH"]})
    container._bring()
    assert (data / "log").read_text().splitlines() == asked and container.idle.failed == failed
    assert bool(capsys.readouterr().err) == bool(failed)
    container.signals.append(15)
    container._bring()
    assert len((data / "log").read_text().splitlines()) == len(asked) + 1, "nothing more is started after a signal"
    wrong = Container(1, {serve.STARTED: "!"})
    with pytest.raises(RunError):
        wrong._bring()
    assert wrong.idle.failed == "! cannot be started", "the pod stops after a minute"


def test_the_page_listens_with_a_password_only_and_is_started_again(data, monkeypatch, capsys):
    (data / "app.py").write_text("import sys; open('words', 'a').write(' '.join(sys.argv[1:]) + ';'); sys.exit(3)")
    monkeypatch.setattr(serve, "ROOT", data)
    for environ in ({}, {"HANGPROOF_AUTH": "me:x"}):
        container = Container(7861, environ)
        container._keep_page()
        assert container.page.wait(30) == 3
        container._keep_page()
        assert container.page is None and 0 < container.page_at_s - time.monotonic() <= serve.PAGE_PAUSE_S
        container._keep_page()
        assert container.page is None, "not at once"
        container.page_at_s = 0.0
        container._keep_page()
        assert container.page.wait(30) == 3
    plain, listening = "--no-browser --port 7861;", "--no-browser --port 7861 --listen;"
    assert (data / "words").read_text() == 2 * plain + 2 * listening
    said = capsys.readouterr().err
    assert said.count("exit code 3; it is started again") == 2 and said.count("HANGPROOF_AUTH is not set") == 2


WATCHED = """import signal, sys, time; from pathlib import Path; from monitor.process.platform import LOCK, Lock
lock = Lock(Path(sys.argv[1]) / LOCK); assert lock.acquire(); print("held", flush=True); time.sleep(600)"""


def test_leaving_preempts_every_monitor_and_names_one_that_stays(data, spawn, monkeypatch, capsys):
    folder = data / "outputs" / "cat"
    folder.mkdir(parents=True)
    (folder / "train.sh").write_text("")
    monitor, other, page = spawn(sys.executable, "-c", WATCHED, str(folder)), spawn(), spawn()
    assert monitor.stdout.readline() == "held\n"
    status = {"state": "running", "keeper_pid": other.pid, "monitor_pid": None}
    (folder / "status.json").write_text(json.dumps(status))
    assert serve.observe() == ({"cat": "running"}, {"cat"})
    container = Container(1, {})
    late = SimpleNamespace(end=SimpleNamespace(preempt_total_s=-5.0))
    with monkeypatch.context() as patch:
        patch.setattr(serve.config, "load", lambda: late)
        assert container.leave() == 1 and "not saved in time: cat" in capsys.readouterr().err
    (folder / "status.json").write_text(json.dumps({**status, "monitor_pid": monitor.pid}))
    container.page = page
    assert container.leave() == 0 and monitor.wait(10) == -signal.SIGTERM and page.poll() is not None
    assert other.poll() is None, "its number belonged to another process"
    assert serve.observe() == ({"cat": "running"}, set())
