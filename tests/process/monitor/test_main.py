"""Who watches the watcher: a stuck monitor is replaced, what it shows is called old, and it touches nothing foreign."""

import json
import os
import signal
import time
from unittest.mock import MagicMock, Mock

import psutil
import pytest
from loopback import answering
from monitor_helpers import events, finish, monitor, started, toy_run, wait_for
from proc_helpers import linux
from run_facts import completed, incidents, status
from toys import AT, GO, HANG, SHORT

from monitor import __main__ as keeper
from monitor.cli import commands
from monitor.run_folder import MonitorError

SILENT = "[watch]\nsilent_s = 6\n"


@linux
@pytest.mark.slow
def test_a_monitor_that_is_stopped_is_reported_and_replaced_and_the_hang_meanwhile_is_recovered(folder):
    """Nobody watched the training: it hung for ever, and `status` said running. The message goes to the user's own
    addresses, because standard error of a monitor in the background is a file on a disk that may be frozen."""
    toy_run(folder, HANG + GO, **SHORT)
    got, addresses = [], folder.parent / "notify.toml"
    with answering(lambda request: got.append(json.loads(request.body)) or (200, "")) as server:  # a chat service
        addresses.write_text(f'urls = ["json://user:s3cr3t-token@127.0.0.1:{server.server_port}/"]\n')
        addresses.chmod(0o600)
        process = started(folder, limits=SILENT, HANGPROOF_NOTIFY=str(addresses))
        stuck = status(folder)["monitor_pid"]
        os.kill(stuck, signal.SIGSTOP)
        (folder / "go").touch()
        wait_for(lambda: f"step {AT}\n" in (folder / "training.log").read_text())
        hung_s = time.monotonic()
        code, _, err = finish(process)
        assert code == 0, err
        assert f"the monitor (pid {stuck}) has not responded for 6 s; replacing it" in err
        wait_for(lambda: len(got) >= 4)  # a helper that has begun to send goes on without the monitor
    assert sorted(message["title"] for message in got) == ["toy", "toy: completed", "toy: hang", "toy: restarted"]
    assert any("has not responded for 6 s" in message["message"] for message in got)
    for path in folder.rglob("*"):
        assert not path.is_file() or b"s3cr3t-token" not in path.read_bytes(), "the addresses stay secret"
    assert status(folder)["monitor_pid"] != stuck and not psutil.pid_exists(stuck)
    completed(folder, restarts=1)
    (incident,) = incidents(folder)
    declared_s = events(folder, "hang")[0]["mono_s"]
    assert incident["detect_s"] >= declared_s - hung_s - 1.0, "counted from the last step, not from the adoption"


@linux
@pytest.mark.slow
@pytest.mark.parametrize("words", ["--keep --ended=137 --checked --before=0 STATE", "--child 0 --checked", "--checked"])
def test_what_was_started_before_an_update_still_starts_a_monitor(folder, words):
    """The keepers and the queue of the version before: nothing watched the training then, or started the next one."""
    code, _, err = finish(monitor(toy_run(folder, **SHORT), "run", *words.split()))
    assert code == 0, err
    completed(folder)


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
