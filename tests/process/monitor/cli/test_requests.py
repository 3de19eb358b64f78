"""Orders at the worst moment: stops, pre-emptions and second monitors while the run hangs, saves, waits or restarts."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from monitor_helpers import (
    ROOT,
    environment,
    events,
    fault_at,
    finish,
    incidents,
    kill_monitor,
    limits_file,
    members,
    monitor,
    status,
    step_of,
    stop,
    supervise,
    toy_run,
    trainers,
    undisturbed,
    wait_for,
    weight,
)

from guards import checkpoint

LINUX = sys.platform.startswith("linux")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals between processes are POSIX")
SHORT = dict(steps=50, pace=0.03, every=10)
AT = 34
HANGS = fault_at(AT, "time.sleep(3600)")


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "toy"
    for pid in trainers(tmp_path / "toy"):  # a test that failed must leave nothing behind
        psutil.Process(pid).kill()


def ended(folder, state: str) -> dict:
    """Assert that the run is in this final state and that nothing of it lives."""
    now = status(folder)
    assert now["state"] == state, now
    assert members(folder) == [] and trainers(folder) == []
    return now


# ---- the user's stop ----


def test_a_stop_while_it_waits_to_restart_starts_nothing_more(folder):
    toy_run(folder, fault_at(5, "raise ValueError('again')", "True"), **SHORT)
    process = monitor(folder)
    wait_for(lambda: status(folder)["state"] == "backoff" and status(folder)["restarts"] == 2)
    stop(folder)
    assert finish(process)[0] == 3
    ended(folder, "stopped")
    assert len(incidents(folder)) == 2


def test_a_stop_while_a_hang_is_being_looked_into_ends_it_without_a_restart(folder):
    toy_run(folder, HANGS, **SHORT)
    process = monitor(folder, HANGPROOF_LIMITS=str(limits_file(folder, "[phases.step]\nfloor_s = 20\n")))
    wait_for(lambda: status(folder)["state"] == "suspect")
    (folder / "stop.request").write_text("{}")  # what `monitor stop` writes, without its start
    assert finish(process)[0] == 3
    assert ended(folder, "stopped")["restarts"] == 0
    assert checkpoint.newest_valid(folder).name == "toy-step00000030-state", "nothing is lost"


def test_a_stop_in_the_middle_of_a_save_waits_for_it(folder):
    toy_run(folder, **SHORT)
    script = folder / "toy.py"
    slow = '    with checkpoint.writing(state(step), step, 1) as folder:\n        (run / "saving").touch(); time.sleep(1.5)\n'
    script.write_text(
        script.read_text().replace("    with checkpoint.writing(state(step), step, 1) as folder:\n", slow)
    )
    process = monitor(folder)
    wait_for(lambda: (folder / "saving").exists())
    stop(folder)
    assert finish(process)[0] == 3
    now = ended(folder, "stopped")
    assert checkpoint.newest_valid(folder).name == f"toy-step{now['step']:08d}-state"
    assert not list(folder.glob(".*-state*")), "no half-written state is left"


def test_a_second_stop_does_not_wait_for_a_checkpoint(folder):
    toy_run(folder, HANGS, **SHORT)
    process = monitor(folder, HANGPROOF_LIMITS=str(limits_file(folder, "[phases.step]\nfloor_s = 600\n")))
    wait_for(lambda: step_of(folder) == AT)
    stop(folder)
    wait_for(lambda: status(folder)["state"] == "stopping")
    assert trainers(folder), "the first waits for a checkpoint"
    stop(folder)
    assert finish(process)[0] == 3
    ended(folder, "stopped")


def test_a_stop_before_the_first_step_does_not_wait_for_a_checkpoint(folder):
    toy_run(folder, **SHORT)
    script = folder / "toy.py"
    script.write_text(script.read_text().replace('hb.phase("load")\n', 'hb.phase("load"); time.sleep(3600)\n'))
    process = monitor(folder)
    wait_for(lambda: status(folder)["phase"] == "load")
    stop(folder)
    assert finish(process)[0] == 3
    ended(folder, "stopped")


def test_ctrl_c_in_the_foreground_is_a_stop_with_a_checkpoint(folder):
    toy_run(folder, steps=2000, pace=0.03, every=1000)
    process = monitor(folder)
    wait_for(lambda: step_of(folder) > 5)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 3
    now = ended(folder, "stopped")
    assert now["checkpoint"]["step"] == now["step"]


# ---- the machine is taken away ----


@pytest.mark.parametrize("moment", [pytest.param("crash", marks=pytest.mark.long), "restarted"])
def test_a_pre_emption_while_it_restarts_ends_it_with_code_5(folder, moment):
    toy_run(folder, fault_at(AT, "os.kill(os.getpid(), 9)"), steps=300, pace=0.03, every=10)
    process = monitor(folder)
    wait_for(lambda: events(folder, moment))
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 5
    assert ended(folder, "preempted")["step"] < 300
    assert supervise(folder)[0] == 0
    assert weight(folder) == undisturbed(300)


def test_a_sigterm_to_everything_at_once_leaves_a_checkpoint_of_the_last_step(folder):
    """As systemd does with a cgroup, and Slurm with a step: monitor, shell, launcher and trainer all get it."""
    toy_run(folder, steps=2000, pace=0.03, every=1000, launcher="child")
    process = monitor(folder)
    wait_for(lambda: step_of(folder) > 15)
    for pid in [*members(folder), status(folder)["monitor_pid"], process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for pid in members(folder):  # a session that ends sends this after it, to those that have not left yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGHUP)
    assert finish(process)[0] == 5
    now = ended(folder, "preempted")
    assert now["checkpoint"]["step"] == now["step"] > 15
    assert incidents(folder) == []


def test_a_stray_sigterm_to_the_trainer_costs_no_step(folder):
    toy_run(folder, steps=150, pace=0.03, every=1000)
    process = monitor(folder)
    wait_for(lambda: step_of(folder) > 15)
    os.kill(trainers(folder)[0], signal.SIGTERM)
    assert finish(process)[0] == 0
    (incident,) = incidents(folder)
    assert incident["cause"] == "terminated" and incident["steps_repeated"] == 0
    assert incident["resumed_from"] == incident["step"] > 15
    assert weight(folder) == undisturbed(150)


def test_a_child_of_the_trainer_that_is_ended_asks_for_nothing(folder):
    fork = "import multiprocessing as m\nc = m.get_context('fork').Process(target=time.sleep, args=(60,))\nc.start(); c.terminate(); c.join(9)\nassert c.exitcode == -15, c.exitcode"
    toy_run(folder, fault_at(AT, fork), **SHORT)
    assert supervise(folder)[0] == 0
    assert ended(folder, "completed")["restarts"] == 0


def test_a_sigterm_before_the_first_step_ends_the_trainer_like_any_process(folder):
    toy_run(folder, **SHORT)
    script = folder / "toy.py"
    wait = 'hb.phase("load"); (attempt > 1) or time.sleep(3600)\n'
    script.write_text(script.read_text().replace('hb.phase("load")\n', wait))
    process = monitor(folder)
    wait_for(lambda: status(folder)["phase"] == "load")
    os.kill(trainers(folder)[0], signal.SIGTERM)
    assert finish(process)[0] == 0
    assert [i["cause"] for i in incidents(folder)] == ["terminated"]


# ---- more than one monitor ----


def test_two_monitors_at_the_same_moment_start_one_training(folder):
    toy_run(folder, steps=5000, pace=0.03)
    processes = [monitor(folder) for _ in range(2)]
    wait_for(lambda: any(process.poll() is not None for process in processes))
    wait_for(lambda: step_of(folder) > 3)
    assert len(trainers(folder)) == len(events(folder, "started")) == 1
    stop(folder, "--now")
    assert sorted(finish(process)[0] for process in processes) == [1, 3]


def test_resume_all_takes_a_living_training_up_and_doubles_nothing(tmp_path):
    folder = toy_run(tmp_path / "outputs" / "toy", steps=5000, pace=0.03)
    env = {"HANGPROOF_DATA": str(tmp_path)}
    process = monitor(folder, **env)
    wait_for(lambda: step_of(folder) > 15)
    kill_monitor(process, folder)
    (trainer,) = trainers(folder)
    command = [sys.executable, "-m", "monitor", "resume-all", "--json"]
    for _ in range(2):  # the second finds it watched
        done = subprocess.run(
            command, cwd=ROOT, env=environment(folder, **env), capture_output=True, text=True, timeout=120, check=True
        )
        assert trainers(folder) == [trainer]
    assert json.loads(done.stdout.splitlines()[-1]) == [], done.stdout
    stop(folder, "--wait", "120", **env)
    now = ended(folder, "stopped")
    assert (now["restarts"], now["attempt"]) == (0, 1) and now["checkpoint"]["step"] == now["step"]


@pytest.mark.long
def test_a_killed_monitor_is_followed_by_one_that_takes_the_living_training_over(folder):
    hang = "def fault(step):\n    if attempt == 1 and (run / 'hang').exists():\n        time.sleep(3600)\n"
    toy_run(folder, hang, steps=400, pace=0.03, every=10)
    process = monitor(folder)
    wait_for(lambda: step_of(folder) > 15)
    kill_monitor(process, folder)
    (trainer,) = trainers(folder)
    assert status(folder)["state"] == "running", "left alone, and the status does not know"
    code, out, _ = finish(monitor(folder, "start", "--json"))
    assert code == 0
    started = json.loads(out.splitlines()[-1])
    assert not started["already"]
    assert trainers(folder) == [trainer], "taken over, not doubled"
    again = json.loads(finish(monitor(folder, "start", "--json"))[1].splitlines()[-1])
    assert again["already"] and again["pid"] == started["pid"]
    (folder / "hang").touch()
    wait_for(lambda: status(folder)["state"] == "completed")
    assert ended(folder, "completed")["restarts"] == 1, "the hang after it was seen by the second monitor"
    assert weight(folder) == undisturbed(400)
    wait_for(lambda: not psutil.pid_exists(started["pid"]))


def test_a_training_that_ended_while_nobody_watched_is_judged_by_its_last_words(folder):
    toy_run(folder, **SHORT)
    process = monitor(folder)
    wait_for(lambda: step_of(folder) > 5)
    kill_monitor(process, folder)
    wait_for(lambda: trainers(folder) == [])
    assert supervise(folder)[0] == 0
    assert ended(folder, "completed")["attempt"] == 1


def test_a_second_monitor_is_refused_and_says_why(folder):
    toy_run(folder, steps=2000, pace=0.05)
    first = monitor(folder)
    wait_for(lambda: step_of(folder) > 3)
    code, _, err = supervise(folder)
    assert code == 1 and "another monitor watches this run" in err
    assert len(trainers(folder)) == 1
    stop(folder, "--now")
    assert finish(first)[0] == 3


# ---- what cannot be written ----


def test_a_folder_that_takes_no_status_and_no_report_does_not_keep_a_run_from_its_end(folder):
    toy_run(folder, HANGS, **SHORT)
    (folder / "incidents").write_text("no folder can be made of this name")
    (folder / "status.json").mkdir()
    code, _, err = supervise(folder)
    assert code == 0 and "cannot write" in err
    assert weight(folder) == undisturbed(SHORT["steps"])
    assert [e["kind"] for e in events(folder) if e["kind"] in ("hang", "restarted")] == ["hang", "restarted"]


def test_a_pre_emption_of_a_trainer_that_cannot_save_any_more_still_ends_in_time(folder):
    toy_run(folder, fault_at(AT, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(3600)"), **SHORT)
    env = {"HANGPROOF_LIMITS": str(limits_file(folder, "[phases.step]\nfloor_s = 60\n[end]\npreempt_save_s = 4\n"))}
    process = monitor(folder, **env)
    wait_for(lambda: step_of(folder) == AT)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 5
    assert time.monotonic() - began < 25
    ended(folder, "preempted")
    assert checkpoint.newest_valid(folder).name == "toy-step00000030-state"
