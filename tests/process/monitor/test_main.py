"""Who watches the watcher: a stuck monitor is replaced, what it shows is called old, and it touches nothing foreign."""

import json
import os
import signal
import subprocess
import time
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import psutil
import pytest
from loopback import answering
from monitor_helpers import events, finish, monitor, started, supervise, toy_run, wait_for
from proc_helpers import linux
from run_facts import completed, incidents, status, trainers
from toys import AT, GO, HANG, SHORT, fault_at

from monitor import __main__ as keeper
from monitor.cli import commands
from monitor.process import platform, spawned
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
def test_nothing_that_a_shell_with_our_variables_started_is_killed_nor_the_keeper(folder, spawn):
    """HANGPROOF_RUN exported in a shell, as a person does who starts a trainer by hand."""
    toy_run(folder, fault_at(AT, "os.kill(os.getpid(), 9)"), **SHORT)
    exported = {"HANGPROOF_RUN": str(folder), "HANGPROOF_ATTEMPT": "1"}
    foreign = spawn("sleep", "300", **exported)
    code, _, err = supervise(folder, **exported)
    assert code == 0, err
    assert foreign.poll() is None, "a process of somebody else was killed"
    assert f"monitor: {folder.name}: " not in err and len(events(folder, "restarted")) == 1
    assert spawned.with_environment(spawned.RUN, str(folder)) == []
    assert not [text for text in spawned.orphans() if str(folder) in text]
    with spawned.idle(folder) as idle:
        assert idle
    code, _, err = finish(monitor(folder, "stop", **exported))
    assert code == 1 and "is not running" in err and foreign.poll() is None


@linux
@pytest.mark.slow
@pytest.mark.parametrize("words", ["--keep --ended=137 --checked --before=0 STATE", "--child 0 --checked", "--checked"])
def test_what_was_started_before_an_update_still_starts_a_monitor(folder, words):
    """The keepers and the queue of the version before: nothing watched the training then, or started the next one."""
    code, _, err = finish(monitor(toy_run(folder, **SHORT), "run", *words.split()))
    assert code == 0, err
    completed(folder)


ORPHANS = """
def fault(step):
    # A grandchild that outlives its parent for a moment: nobody but the subreaper can wait for it.
    subprocess.run(["sh", "-c", "sleep 0.0$(($$ % 9)) & :"])
"""


@linux
@pytest.mark.slow
def test_no_orphan_of_the_training_stays_a_zombie(folder):
    toy_run(folder, ORPHANS, steps=5000, pace=0.02, every=1000)
    process = started(folder, 30, HANGPROOF_RUN=str(folder), HANGPROOF_TOKEN="f" * 32)
    watcher = status(folder)["monitor_pid"]
    for one in (process.pid, watcher):
        exported = psutil.Process(one).environ()
        assert not [name for name in exported if name in spawned.MARKS], "it does not look like a training"
    assert "HANGPROOF_NOTIFY" not in psutil.Process(trainers(folder)[0]).environ(), "the monitor's, not the training's"
    os.kill(trainers(folder)[0], signal.SIGSTOP)  # no new ones
    wait_for(lambda: not [p for p in platform.scan().values() if p.ppid == watcher and p.dead], what="no zombie")
    process.send_signal(signal.SIGINT)
    os.kill(trainers(folder)[0], signal.SIGCONT)
    finish(process)


@linux
@pytest.mark.slow
def test_a_run_that_fails_under_a_monitor_that_was_replaced_ends_as_failed(folder):
    """Its exit code 1 is not taken for a monitor that could not start."""
    toy_run(folder, fault_at(AT, "sys.exit(7)", "True") + GO, **SHORT)
    limits = "[restart]\nwithout_progress_count = 1\nbackoff_first_s = 0.1\n"
    process = started(folder, limits=limits)
    before, old = trainers(folder), status(folder)["monitor_pid"]
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: status(folder)["monitor_pid"] != old and status(folder)["state"] == "running")
    assert trainers(folder) == before and "adopted" in events(folder, "started")[-1]["message"]
    (folder / "go").touch()
    code, _, err = finish(process)
    assert code == 4 and err.count("restarting it") == 1, err
    assert status(folder)["state"] == "failed"


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


def test_on_windows_the_log_has_what_a_monitor_in_the_background_prints(monkeypatch):
    """`start` says why a monitor ended at once, and reads that there. Without a console no stream is inherited."""
    monkeypatch.setattr(keeper.sys, "platform", "win32")
    monkeypatch.setattr(keeper.subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200, raising=False)
    monkeypatch.setattr(keeper.subprocess, "Popen", started := Mock())
    keeper._start("/runs/toy", [])
    assert started.call_args.kwargs["stderr"] is keeper.sys.stderr


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
