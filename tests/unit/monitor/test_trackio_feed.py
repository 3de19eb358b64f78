"""What is logged to trackio: each step once, whatever the file of metrics holds."""

import json
import os
import subprocess
import sys
from unittest.mock import Mock, call, patch

import pytest
from hypothesis import given, settings, strategies as st

import runs
from monitor import trackio_feed
from monitor.process.platform import Lock
from monitor.run_folder import RunFolder
from runs import command
from runs.paths import ROOT

HANGS = "import time; time.sleep(600)"


def test_the_known_values_of_each_new_step_are_logged_and_the_process_ends_after_the_run(tmp_path):
    tracker = Mock()
    for lines in (
        [{"kind": "gpu", "gpu": 0, "power_w": 200}, {"kind": "step", "step": 1, "loss": 1.0}],
        [{"kind": "step", "step": 2, "loss": None, "lr": 0.1}],
    ):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        with patch.object(trackio_feed, "atomic_write", wraps=trackio_feed.atomic_write) as written:
            trackio_feed.feed(tmp_path, tracker, poll_s=0.02, end_s=0.1)
        assert written.call_count == 1, "not again and again while nothing is new"
    assert tracker.log.call_args_list == [call({"loss": 1.0}, step=1), call({"lr": 0.1}, step=2)]


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


@pytest.mark.parametrize(("module", "said"), [("raise OSError('no port')", "no port. The run continues"), (HANGS, "")])
def test_a_tracker_that_fails_or_hangs_ends_its_own_process_only(tmp_path, module, said):
    (tmp_path / "trackio.py").write_text(module)
    code = (
        "import sys; from monitor import trackio_feed as f; f.START_S = 1.0; f.main(f.RunFolder(f.Path(sys.argv[1])))"
    )
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environ, timeout=60, capture_output=True)
    events = tmp_path / "events.jsonl"
    assert said in (events.read_text() if events.exists() else "")


def test_no_trainer_gets_the_option(data, tmp_path):
    for trackers, expected in (("trackio", False), ("tensorboard", True)):
        flags = command.flags(runs.make({"name": "a", "trackers": trackers}), tmp_path)
        assert ("log_with" in flags) == expected


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=80), max_size=20))
def test_no_line_can_break_it(tmp_path_factory, noise):
    folder, tracker = tmp_path_factory.mktemp("run"), Mock()
    lines = [*noise, b'{"kind":"step","step":7,"loss":0.5}']
    (folder / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    trackio_feed.feed(folder, tracker, poll_s=0.0, end_s=0.0)
    assert tracker.log.call_args_list[-1] == call({"loss": 0.5}, step=7)
