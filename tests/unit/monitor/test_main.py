"""The keeper, and the monitor that it starts, where the system refuses them something."""

import os
import subprocess
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest

from monitor import __main__ as keeper
from monitor.cli import commands
from monitor.run_folder import MonitorError


@pytest.mark.skipif(
    not subprocess._USE_POSIX_SPAWN, reason="this system's C library has no posix_spawn that can be used"
)
def test_the_monitor_is_started_in_a_way_that_either_starts_it_or_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "_fork_exec", Mock(side_effect=AssertionError("what follows a fork can fail")))
    process, beats = keeper._start(str(tmp_path), [])
    process.kill()
    process.wait()
    os.close(beats)


def test_a_keeper_that_cannot_receive_signals_says_so_and_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(keeper.signal, "signal", Mock(side_effect=OSError(12, "Cannot allocate memory")))
    monkeypatch.setattr(keeper, "_start", lambda folder, options: pytest.fail("a monitor was started"))
    assert keeper.keep(["9", str(tmp_path.parent), str(tmp_path)]) == 1
    sentence = f"monitor: {tmp_path.name}: cannot receive signals: Cannot allocate memory; start it again\n"
    assert capsys.readouterr().err == sentence


def test_every_monitor_is_given_the_folder_of_all_runs_and_the_tenth_failure_in_a_row_is_the_last(monkeypatch):
    refused = [OSError(12, "Cannot allocate memory")] * (keeper.TRIES_COUNT - 1)
    start, said = Mock(side_effect=[*refused, (Mock(wait=lambda: 0xC0000005), -1)]), []  # the last: a crash on Windows
    for owner, name, value in ((keeper, "_start", start), (keeper.signal, "signal", Mock()), (keeper.time, "sleep", Mock()),
                               (keeper, "_say", lambda run, text, send=False: said.append((text, send)))):  # fmt: skip
        monkeypatch.setattr(owner, name, value)
    assert keeper.keep(["9", "/runs", "/runs/toy"]) == 1
    options = [call.args[1] for call in start.call_args_list]
    assert options == [["--outputs=/runs"], *[["--outputs=/runs", "--restarted"]] * (keeper.TRIES_COUNT - 1)]
    assert said[-1][1] and "10 times in a row; see /runs/toy/monitor.log. Nothing watches the training" in said[-1][0]
    assert not any(send for _, send in said[:-1])


def test_a_keeper_whose_calls_fail_still_waits_for_the_monitor_that_it_has_started(monkeypatch):
    """It said "cannot be started" of a living monitor, started a second one, and ended with exit code 1."""
    error = OSError(5, "Input/output error")
    beats, writer = os.pipe()
    os.close(writer)
    close, begin = os.close, keeper._start

    def fails(descriptor):
        close(descriptor)  # as close(2) does
        raise error

    start = Mock(return_value=(SimpleNamespace(poll=lambda: None, wait=lambda: 3), beats))
    for owner, name, value in (
        (keeper, "_start", start),
        (keeper.signal, "signal", Mock()),
        (keeper.time, "sleep", Mock()),
        (keeper.select, "select", Mock(side_effect=[error, error, ([beats], [], [])])),
        (keeper.os, "close", fails),
    ):
        monkeypatch.setattr(owner, name, value)
    assert keeper.keep(["9", "/runs", "/runs/toy"]) == 3 and start.call_count == 1
    monkeypatch.setattr(keeper.subprocess, "Popen", lambda *_, **__: "the monitor")
    started, beats = begin("/runs/toy", [])
    assert started == "the monitor"
    close(beats)


def test_on_windows_the_keeper_waits_in_slices_because_one_long_wait_delays_ctrl_c_and_it_sends_messages(monkeypatch):
    monkeypatch.setattr(keeper.sys, "platform", "win32")
    monkeypatch.setattr(keeper.time, "sleep", sleep := Mock())
    assert keeper._wait(Mock(poll=Mock(side_effect=[None, None, 5]), wait=lambda: 5), -1, 60.0) == 5
    assert sleep.call_count == 2
    monkeypatch.setattr(keeper.subprocess, "Popen", started := MagicMock())
    keeper._say("toy", "nothing watches the training", send=True)
    assert started.call_args.args[0][1:] == ["-m", "monitor.cli.notify"]


@pytest.mark.parametrize("call", ["signal.signal", "os.setsid"])
def test_a_monitor_that_fails_before_it_has_begun_is_started_again(call, monkeypatch, capsys):
    """Exit code 1 would mean that the run cannot be supervised, and the keeper would leave it unwatched."""
    monkeypatch.setattr(call, Mock(side_effect=OSError(28, "No space left on device")))
    assert keeper._child([str(os.getpid()), "--outputs=.", "folder"]) == keeper.EXIT_ERROR
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "does", "code", "out", "err"),
    [
        (["status", "--json"], lambda args: (3, {"step": 1}), 3, '{"step": 1}\n', ""),
        (["status"], lambda args: (0, {"step": 1}), 0, "", ""),
        (["resume-all", "--json"], lambda args: (0, None), 0, "", ""),
        (["stop", "toy", "--wait", "2"], Mock(side_effect=MonitorError("gone")), 1, "", "monitor: gone\n"),
    ],
)
def test_a_command_ends_with_its_code_and_a_line_of_json(words, does, code, out, err, monkeypatch, capsys):
    monkeypatch.setattr(commands, words[0].replace("-", "_"), does)
    assert keeper.main(words) == code and capsys.readouterr() == (out, err)
    with pytest.raises(SystemExit, match="2"):
        keeper.main(["run", "toy", "--json"])  # it has no JSON to end with


def test_a_status_of_no_runs_says_where_there_are_none(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    assert keeper.main(["status"]) == 0 and f"no runs in {tmp_path}" in capsys.readouterr().out
