"""What is logged to trackio: each step once, whatever the file of metrics holds."""

import json
import os
import sys
from unittest.mock import Mock

from hypothesis import given, settings, strategies as st

import runs
from monitor import trackio_feed
from monitor.process.platform import Lock
from monitor.run_folder import RunFolder
from runs import command


def test_the_process_ends_after_the_run(tmp_path):
    def write(*steps):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps({"kind": "step", "step": step, "loss": 1.0}) + "\n" for step in steps)

    write(1, 2)
    tracker = Mock()
    trackio_feed.feed(tmp_path, tracker, poll_s=0.02, end_s=0.1)
    write(3)
    trackio_feed.feed(tmp_path, tracker, poll_s=0.02, end_s=0.1)
    assert [logged.kwargs["step"] for logged in tracker.log.call_args_list] == [1, 2, 3]


def test_one_process_logs_a_run_as_long_as_it_lives(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text('name = "my-run"\ntrackers = "trackio"\nrank = 8\n')
    trackio, locks = Mock(), []
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setattr(os, "_exit", Mock())
    monkeypatch.setattr(trackio_feed.faulthandler, "dump_traceback_later", Mock())
    monkeypatch.setattr(trackio_feed, "feed", Mock())
    monkeypatch.setattr(trackio_feed, "Lock", lambda path: locks.append(Lock(path)) or locks[-1])
    for _ in range(2):  # a second attempt: the first process goes on alone
        trackio_feed.main(RunFolder(tmp_path))
    config = {"name": "my-run", "trackers": "trackio", "rank": 8}
    known = dict(project="hangproof", name=tmp_path.name, config=config, resume="allow", embed=False)
    trackio.init.assert_called_once_with(**known)
    trackio_feed.feed.assert_called_once_with(tmp_path, trackio.init())
    trackio.init().finish.assert_called_once_with()
    for lock in locks:
        lock.release()


def fed(folder, lines: list[bytes]) -> list:
    """What is logged of these lines."""
    (folder / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    (folder / trackio_feed.STATE).unlink(missing_ok=True)
    tracker = Mock()
    trackio_feed.feed(folder, tracker, poll_s=0.0, end_s=0.0)
    return [(call.kwargs["step"], *call.args) for call in tracker.log.call_args_list]


def test_the_known_values_of_each_new_step_are_logged(tmp_path):
    lines = [
        {"kind": "gpu", "gpu": 0, "power_w": 200},
        {"kind": "step", "step": 1, "loss": 1.0},
        {"kind": "step", "step": 2, "loss": None, "lr": 0.1},
    ]
    assert fed(tmp_path, [json.dumps(line).encode() for line in lines]) == [(1, {"loss": 1.0}), (2, {"lr": 0.1})]


def test_no_trainer_gets_the_option(data, tmp_path):
    for trackers, expected in (("trackio", False), ("tensorboard", True)):
        flags = command.flags(runs.make({"name": "a", "trackers": trackers}), tmp_path)
        assert ("log_with" in flags) == expected


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=80), max_size=20))
def test_no_line_can_break_it(tmp_path_factory, noise):
    lines = [*noise, b'{"kind":"step","step":7,"loss":0.5}']
    assert fed(tmp_path_factory.mktemp("run"), lines)[-1] == (7, {"loss": 0.5})
