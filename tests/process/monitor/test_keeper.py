"""Who watches the watcher: a monitor that is stuck is replaced, what it shows is called old, and it touches nothing foreign."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from frozen_disk import frozen, loop_disk, why_not
from monitor_helpers import (
    ROOT,
    environment,
    events,
    fault_at,
    finish,
    incidents,
    limits_file,
    monitor,
    status,
    step_of,
    supervise,
    toy_run,
    trainers,
    undisturbed,
    wait_for,
    weight,
)

from monitor.process import tree
from monitor.state import read_status

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc")
SHORT = dict(steps=60, pace=0.03, every=10)
AT = 44
SILENT = "[watch]\nsilent_s = 6\n"


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "toy"
    end(tmp_path / "toy")


def end(folder):
    """A test that failed must leave nothing behind."""
    with contextlib.suppress(OSError, ValueError):
        for name in ("keeper_pid", "monitor_pid"):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(status(folder)[name]).kill()
    for pid in trainers(folder):
        psutil.Process(pid).kill()


def shown(folder, **env) -> str:
    """What `monitor status` prints."""
    command = [sys.executable, "-m", "monitor", "status", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment(folder, **env), capture_output=True, text=True).stdout


def test_a_monitor_that_is_stopped_is_replaced_and_the_hang_that_follows_is_recovered(folder):
    """Nobody watched the training: it hung for ever, and `status` said running."""
    toy_run(folder, fault_at(AT, "time.sleep(3600)"), **SHORT)
    process = monitor(folder, HANGPROOF_LIMITS=str(limits_file(folder, SILENT)))
    wait_for(lambda: step_of(folder) > 5)
    stuck = status(folder)["monitor_pid"]
    os.kill(stuck, signal.SIGSTOP)
    code, _, err = finish(process)
    assert code == 0, err
    assert f"the monitor (pid {stuck}) has not responded for 6 s; replacing it" in err
    assert status(folder)["monitor_pid"] != stuck and not psutil.pid_exists(stuck)
    assert status(folder)["state"] == "completed" and status(folder)["restarts"] == 1
    assert weight(folder) == undisturbed(SHORT["steps"])


def test_time_lost_is_counted_from_the_last_step_also_when_nobody_watched(folder):
    toy_run(folder, fault_at(AT, "time.sleep(3600)"), **SHORT)
    process = monitor(folder, HANGPROOF_LIMITS=str(limits_file(folder, SILENT)))
    wait_for(lambda: step_of(folder) > 5)
    os.kill(status(folder)["monitor_pid"], signal.SIGSTOP)
    stopped_s = time.monotonic()
    wait_for(lambda: f"step {AT}\n" in (folder / "training.log").read_text())
    hung_s = time.monotonic()
    assert finish(process)[0] == 0
    adopted_s = next(e["mono_s"] for e in events(folder, "started") if "adopted" in e["message"])
    (incident,) = incidents(folder)
    declared_s = events(folder, "hang")[0]["mono_s"]
    assert adopted_s - stopped_s > 6, "the monitor was replaced after the hang began"
    assert incident["detect_s"] >= declared_s - hung_s - 1.0, "from the last step, not from the adoption"
    assert incident["detect_s"] <= declared_s - stopped_s + 1.0


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_frozen_disk_is_reported_at_once_and_the_run_goes_on_when_it_thaws(tmp_path):
    with loop_disk(tmp_path) as disk:
        folder = toy_run(disk / "toy", steps=200, pace=0.03, every=20)
        (tmp_path / "limits.toml").write_text("allow_below_guards = true\n" + SILENT)
        (tmp_path / "tmp").mkdir()
        env = {"TMPDIR": str(tmp_path / "tmp"), "HANGPROOF_SHM": str(tmp_path / "tmp")}
        env["HANGPROOF_LIMITS"] = str(tmp_path / "limits.toml")
        process = monitor(folder, **env)
        try:
            wait_for(lambda: step_of(folder) > 5)
            stuck = psutil.Process(status(folder)["monitor_pid"])
            said = []
            reader = threading.Thread(target=lambda: said.extend(iter(process.stderr.readline, "")), daemon=True)
            with frozen(disk):
                reader.start()
                wait_for(lambda: any("cannot be killed" in line for line in said), what="it is reported")
                assert "Nothing watches the training" in said[-1], said
                assert stuck.status() == psutil.STATUS_DISK_SLEEP and len(trainers(folder)) == 1
                assert read_status(folder)["age_s"] > 10, "it can still be read, and says how old it is"
            assert process.wait(180) == 0, said
            assert status(folder)["state"] == "completed" and weight(folder) == undisturbed(200)
            assert len(events(folder, "started")) == 2, "started once, adopted once"
        finally:
            end(folder)
            process.kill()
            reader.join()
            process.communicate()


def test_a_silent_monitor_is_reported_to_the_users_own_addresses(folder, tmp_path):
    """Standard error of a monitor in the background is a file on the disk that may be frozen."""
    (tmp_path / "fake").mkdir()
    sent = tmp_path / "sent"
    (tmp_path / "fake" / "apprise.py").write_text(
        "class Apprise:\n    def add(self, url): return True\n"
        f"    def notify(self, title, body, notify_type):\n        open({str(sent)!r}, 'a').write(title + ': ' + body + chr(10)); return True\n"
    )
    (tmp_path / "notify.toml").write_text('urls = ["x://y"]\n')
    (tmp_path / "notify.toml").chmod(0o600)
    toy_run(folder, steps=300, pace=0.05, every=50)
    env = {"HANGPROOF_LIMITS": str(limits_file(folder, SILENT)), "HANGPROOF_NOTIFY": str(tmp_path / "notify.toml")}
    process = monitor(folder, PYTHONPATH=str(tmp_path / "fake"), **env)
    wait_for(lambda: step_of(folder) > 5)
    os.kill(status(folder)["monitor_pid"], signal.SIGSTOP)
    wait_for(lambda: "has not responded for 6 s" in sent.read_text())
    assert finish(process)[0] == 0


def test_a_keeper_that_was_stopped_with_its_monitor_does_not_replace_it(folder):
    """A laptop that sleeps, a container that is paused: the monitor gets a moment to beat again."""
    toy_run(folder, steps=400, pace=0.03, every=100)
    process = monitor(folder, HANGPROOF_LIMITS=str(limits_file(folder, SILENT)))
    wait_for(lambda: step_of(folder) > 5)
    watching = status(folder)["monitor_pid"]
    for pid in (process.pid, watching):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(8)
    for pid in (process.pid, watching):
        os.kill(pid, signal.SIGCONT)
    code, _, err = finish(process)
    assert code == 0 and "not responded" not in err
    assert status(folder)["monitor_pid"] == watching


def test_a_keeper_that_has_replaced_a_monitor_watches_the_next_one_too(folder):
    """The first one is watched by a shell, the others by Python."""
    toy_run(folder, steps=1200, pace=0.03, every=100)
    process = monitor(folder, HANGPROOF_LIMITS=str(limits_file(folder, SILENT)))
    seen = []
    for number in (signal.SIGKILL, signal.SIGSTOP):
        wait_for(lambda: status(folder)["monitor_pid"] not in seen and status(folder)["state"] == "running")
        seen.append(status(folder)["monitor_pid"])
        os.kill(seen[-1], number)
    code, _, err = finish(process)
    assert code == 0 and "was killed by SIGKILL; restarting" in err and f"(pid {seen[1]}) has not responded" in err
    assert len(events(folder, "started")) == 3 and trainers(folder) == []


def test_old_figures_are_called_old(folder):
    from monitor.state import with_age

    toy_run(folder, steps=5000, pace=0.03, every=1000)
    process = monitor(folder)
    wait_for(lambda: step_of(folder) > 5)
    assert read_status(folder)["stale"] == "" and read_status(folder)["age_s"] < 25
    os.kill(status(folder)["monitor_pid"], signal.SIGSTOP)
    known = status(folder)
    later = with_age({**known, "alive": True, "updated_mono_s": known["updated_mono_s"] - 95})
    assert later["stale"].endswith("s old: the monitor does not respond") and 94 <= later["age_s"] < 130
    assert with_age({**known, "alive": False, "updated_mono_s": known["updated_mono_s"] - 95})["stale"] == ""
    assert with_age({**known, "alive": True, "boot": "another", "updated_at": "2026-01-01T00:00:00Z"})["stale"]
    wait_for(lambda: "does not respond" in shown(folder))
    process.kill()
    end(folder)
    finish(process)


def test_nothing_that_a_shell_with_our_variables_started_is_killed_nor_the_keeper(folder):
    """HANGPROOF_RUN exported in a shell, as a person does who starts a trainer by hand."""
    toy_run(folder, fault_at(AT, "os.kill(os.getpid(), 9)"), **SHORT)
    exported = {"HANGPROOF_RUN": str(folder), "HANGPROOF_ATTEMPT": "1"}
    foreign = subprocess.Popen(["sleep", "300"], env={**os.environ, **exported})
    try:
        code, _, err = supervise(folder, **exported)
        assert code == 0, err
        assert foreign.poll() is None, "a process of somebody else was killed"
        assert f"monitor: {folder.name}: " not in err and len(events(folder, "restarted")) == 1
        assert tree.with_environment(tree.RUN, str(folder)) == []
        assert not [text for text in tree.orphans() if str(folder) in text]
        with tree.idle(folder) as idle:
            assert idle
        code, _, err = finish(monitor(folder, "stop", **exported))
        assert code == 1 and "nothing of it runs" in err and foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


def test_what_the_monitor_starts_that_is_no_training_does_not_look_like_one(folder):
    toy_run(folder, steps=2000, pace=0.03, every=1000)
    process = monitor(folder, HANGPROOF_RUN=str(folder), HANGPROOF_TOKEN="f" * 32)
    wait_for(lambda: step_of(folder) > 5)
    watching = psutil.Process(status(folder)["monitor_pid"])
    for one in (psutil.Process(process.pid), watching):
        assert not [name for name in one.environ() if name in tree.MARKS]
    process.send_signal(signal.SIGINT)
    finish(process)


ORPHANS = """
def fault(step):
    # A grandchild that outlives its parent for a moment: nobody but the subreaper can wait for it.
    subprocess.run(["sh", "-c", "sleep 0.0$(($$ % 9)) & :"])
"""


def zombies(pid: int) -> list[int]:
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


def test_no_orphan_of_the_training_stays_a_zombie(folder):
    toy_run(folder, ORPHANS, steps=2000, pace=0.02, every=1000)
    process = monitor(folder)
    wait_for(lambda: step_of(folder) >= 110)
    most = []
    for _ in range(20):
        most.append(len(zombies(status(folder)["monitor_pid"])))
        time.sleep(0.1)
    os.kill(trainers(folder)[0], signal.SIGSTOP)  # no new ones
    wait_for(lambda: not zombies(status(folder)["monitor_pid"]), what="all are collected")
    process.send_signal(signal.SIGINT)
    os.kill(trainers(folder)[0], signal.SIGCONT)
    finish(process)
    assert max(most) < 60, most


def test_a_run_that_fails_under_a_monitor_that_was_replaced_ends_as_failed(folder):
    """Its exit code 1 is not taken for a monitor that could not start."""
    toy_run(folder, fault_at(AT, "sys.exit(7)", "True"), **SHORT)
    limits = "[restart]\nwithout_progress_count = 1\nbackoff_first_s = 0.1\n"
    process = monitor(folder, HANGPROOF_LIMITS=str(limits_file(folder, limits)))
    wait_for(lambda: step_of(folder) > 5)
    os.kill(status(folder)["monitor_pid"], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 4 and err.count("restarting it") == 1, err
    assert status(folder)["state"] == "failed"


@pytest.mark.parametrize("state, code", [("failed", 1), ("completed", 0)])
def test_a_monitor_that_is_killed_after_the_end_was_saved_is_not_followed_by_a_new_start(folder, state, code):
    toy_run(folder, "" if code == 0 else fault_at(AT, "sys.exit(7)", "True"), **SHORT)
    place = folder.parent / "inject"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        "import os, signal, sys\nreal = os.replace\n"
        "def deadly(a, b, **k):\n"
        f"    end = str(b).endswith('monitor.json') and b'\"{state}\"' in open(a, 'rb').read()\n"
        "    real(a, b, **k)\n    if end:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "if any(sys.orig_argv[i:i+3] == ['-m', 'monitor', 'run'] for i in range(6)):\n    os.replace = deadly\n"
    )
    limits = "[restart]\nwithout_progress_count = 1\nbackoff_first_s = 0.1\n"
    env = {"HANGPROOF_LIMITS": str(limits_file(folder, limits)), "PYTHONPATH": str(place)}
    found, _, err = supervise(folder, **env)
    assert found == code and err.count("restarting it") == 1, err
    assert status(folder)["state"] == state and len(events(folder, "started")) == 1
