"""Who watches the watcher: a stuck monitor is replaced, what it shows is called old, and it touches nothing foreign."""

import json
import os
import signal
import sys
import time

import psutil
import pytest
from loopback import answering
from monitor_helpers import events, finish, monitor, started, supervise, toy_run, wait_for
from run_facts import completed, incidents, status, trainers
from toys import AT, GO, HANG, SHORT, fault_at

from monitor.process import platform, spawned

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc")]
SILENT = "[watch]\nsilent_s = 6\n"


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
    assert code == 1 and "nothing of it runs" in err and foreign.poll() is None


ORPHANS = """
def fault(step):
    # A grandchild that outlives its parent for a moment: nobody but the subreaper can wait for it.
    subprocess.run(["sh", "-c", "sleep 0.0$(($$ % 9)) & :"])
"""


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
