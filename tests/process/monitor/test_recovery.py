"""Faults that once lost a run: each test failed on the monitor before its fix.

The errors are put into the monitor's own process from outside: a `sitecustomize.py` in the first folder of PYTHONPATH, which
acts only in the process that watches (`python -m monitor run …`).
"""

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
from monitor.process.locks import Lock
from monitor.resume import checkpoints
from monitor.run_folder import RunFolder
from monitor.state import FINAL, AttemptRecord, Failure, RunState, Shutdown, State
from monitor.supervisor import Supervisor

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc")
SHORT = dict(steps=50, pace=0.03, every=10)
AT = 34
HANG = fault_at(AT, "time.sleep(3600)")
WATCHES = "import sys\nif any(sys.orig_argv[i:i+3] == ['-m', 'monitor', 'run'] for i in range(6)):\n"


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "toy"
    for pid in trainers(tmp_path / "toy"):  # a test that failed must leave nothing behind
        psutil.Process(pid).kill()


def inject(folder, code: str) -> dict[str, str]:
    """Environment in which `code` runs at the start of the watching process."""
    place = folder.parent / "inject"
    place.mkdir()
    body = "".join(f"    {line}\n" for line in code.strip().splitlines())
    (place / "sitecustomize.py").write_text(WATCHES + body)
    return {"PYTHONPATH": str(place)}


NO_KERNEL_COUNTERS = """
import builtins, io
real = builtins.open
def missing(path, *args, **kwargs):
    if str(path).startswith(("/proc/vmstat", "/proc/diskstats", "/proc/meminfo", "/proc/pressure")):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return real(path, *args, **kwargs)
builtins.open = io.open = missing
"""
A_BUG = """
import importlib.abc, importlib.util
from monitor.detect import progress
real, calls = progress.Watch.observe, []
def observe(self, seen):
    calls.append(1)
    if len(calls) % 4 == 0 and len(calls) < 40:
        raise ZeroDivisionError("a bug that nobody expected")
    return real(self, seen)
progress.Watch.observe = observe
"""


def test_a_kernel_without_counters_such_as_gvisor_costs_evidence_and_not_the_monitor(folder):
    toy_run(folder, HANG, **SHORT)
    assert supervise(folder, **inject(folder, NO_KERNEL_COUNTERS))[0] == 0
    assert status(folder)["state"] == "completed" and status(folder)["restarts"] == 1
    assert weight(folder) == undisturbed(SHORT["steps"])


def test_an_error_that_nobody_expected_is_logged_reported_once_and_the_loop_goes_on(folder):
    toy_run(folder, HANG, **SHORT)
    code = f"sys.path.insert(0, {str(ROOT)!r})\n" + A_BUG
    assert supervise(folder, **inject(folder, code))[0] == 0
    assert status(folder)["state"] == "completed" and weight(folder) == undisturbed(SHORT["steps"])
    assert len(events(folder, "monitor_error")) == 1
    log = (folder / "monitor.log").read_text()
    assert "Traceback (most recent call last)" in log and "ZeroDivisionError: a bug that nobody expected" in log
    assert "the same error, 2 times" in log


NO_EVENT_AT_A_START = """
from monitor import run_folder
real, failed = run_folder.RunFolder.event, []
def event(self, kind, message, **more):
    if kind in ("started", "restarted") and failed.count(kind) < 3:
        failed.append(kind)
        raise OSError(28, "No space left on device")
    return real(self, kind, message, **more)
run_folder.RunFolder.event = event
"""


def test_an_error_right_after_a_start_does_not_end_the_attempt_that_was_started(folder):
    toy_run(folder, HANG, **SHORT)
    code = f"sys.path.insert(0, {str(ROOT)!r})\n" + NO_EVENT_AT_A_START
    assert supervise(folder, **inject(folder, code))[0] == 0
    assert status(folder)["state"] == "completed" and weight(folder) == undisturbed(SHORT["steps"])
    assert (folder / "training.log").read_text().count("=== ") == 2, "one attempt before the hang and one after it"
    assert len(events(folder, "killed")) == len(events(folder, "started")) == len(events(folder, "restarted")) == 1


@pytest.mark.parametrize("hangs", [True, False])
def test_a_monitor_that_fails_at_every_turn_stops_a_hung_run_with_the_reason_and_leaves_a_healthy_one(folder, hangs):
    toy_run(folder, HANG if hangs else "", steps=150, pace=0.05, every=10)
    bug = A_BUG.replace("len(calls) % 4 == 0 and len(calls) < 40", "len(calls) > 4")
    code = f"sys.path.insert(0, {str(ROOT)!r})\n" + bug
    env = {"HANGPROOF_LIMITS": str(limits_file(folder, "[watch]\nfault_s = 3\n"))}
    assert supervise(folder, **inject(folder, code), **env)[0] == (1 if hangs else 0)
    now = status(folder)
    if hangs:
        assert now["state"] == "failed" and "a bug that nobody expected" in now["reason"]
        assert checkpoint.newest_valid(folder).name == "toy-step00000030-state"
    else:
        assert now["state"] == "completed" and weight(folder) == undisturbed(150)
    assert trainers(folder) == []


def test_a_monitor_that_is_killed_comes_back_within_10_s_and_doubles_nothing(folder):
    toy_run(folder, steps=300, pace=0.05, every=20)
    process = monitor(folder)
    wait_for(lambda: step_of(folder) > 20)
    (trainer,) = trainers(folder)
    for _ in range(2):
        old = status(folder)["monitor_pid"]
        os.kill(old, signal.SIGKILL)
        began = time.monotonic()
        wait_for(lambda old=old: status(folder)["monitor_pid"] != old and status(folder)["state"] == "running")
        assert time.monotonic() - began < 10
        assert trainers(folder) == [trainer]
        step = step_of(folder)
        wait_for(lambda step=step: step_of(folder) > step)
    stop(folder, "--now")
    assert finish(process)[0] == 3
    assert [e for e in events(folder, "started") if "adopted" in e["message"]]


def test_a_monitor_killed_in_the_middle_of_a_recovery_is_followed_by_one_that_finishes_it(folder):
    """The failure is counted once: one incident, one restart."""
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsubprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, 1); time.sleep(3600)'])\ntime.sleep(3600)"
    toy_run(folder, fault_at(AT, deaf), **SHORT)
    process = monitor(folder, HANGPROOF_LIMITS=str(limits_file(folder, "[end]\ngrace_s = 5\n")))
    wait_for(lambda: status(folder)["state"] == "recovering")
    os.kill(status(folder)["monitor_pid"], signal.SIGKILL)
    assert finish(process)[0] == 0
    assert status(folder)["restarts"] == 1 and len(incidents(folder)) == 1
    assert incidents(folder)[0]["kind"] == "hang" and incidents(folder)[0]["recover_s"] is not None
    assert weight(folder) == undisturbed(SHORT["steps"])


TWO_STAGES = """
import os, sys, time
sys.path.insert(0, {root!r})
from guards.heartbeat import Heartbeat
hb = Heartbeat.from_env()
hb.phase("cache_latents", 5)
for n in range(1, 6):
    time.sleep(0.02); hb.item(n)
hb.end("done")
"""


def test_a_script_of_two_stages_is_not_ended_while_the_second_stage_imports(folder):
    toy_run(folder, **SHORT)
    (folder / "cache.py").write_text(TWO_STAGES.format(root=str(ROOT)))
    script = f"cd {folder}\n{sys.executable} cache.py && sleep 6 && {sys.executable} toy.py\n"
    (folder / "train.sh").write_text(script)
    assert supervise(folder)[0] == 0
    assert status(folder)["state"] == "completed" and weight(folder) == undisturbed(SHORT["steps"])
    assert status(folder)["restarts"] == 0 and incidents(folder) == []


def test_a_second_stage_that_fails_is_not_called_completed(folder):
    toy_run(folder, **SHORT)
    (folder / "cache.py").write_text(TWO_STAGES.format(root=str(ROOT)))
    (folder / "train.sh").write_text(f"cd {folder}\n{sys.executable} cache.py && sleep 0.5 && exit 7\n")
    env = {"HANGPROOF_LIMITS": str(limits_file(folder, "[restart]\nbackoff_first_s = 0.1\n"))}
    assert supervise(folder, **env)[0] == 4
    assert status(folder)["state"] == "failed"


def test_a_lora_that_the_script_copies_slowly_at_its_end_is_waited_for(tmp_path, monkeypatch):
    """The rank is gone and the shell lives: it copies. Killed after 3 s, it left half a LoRA that was called completed."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    from PIL import Image

    import runs

    (tmp_path / "photos").mkdir()
    Image.new("RGB", (64, 64), "red").save(tmp_path / "photos" / "red.png")
    tensors = json.dumps({"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}})
    program = tmp_path / "accelerate"
    (tmp_path / "trainer.py").write_text(
        f"import struct, sys\nfrom pathlib import Path\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from guards.heartbeat import Heartbeat\nhb = Heartbeat.from_env()\nhb.plan(1); hb.phase('first_step'); hb.step(1)\n"
        "words = sys.argv\nout = Path(words[words.index('--output_dir') + 1])\n"
        f"header = {tensors!r}.encode()\n"
        "(out / (words[words.index('--output_name') + 1] + '.safetensors')).write_bytes(\n"
        "    struct.pack('<Q', len(header)) + header + bytes(4000))\nhb.end('done')\n"
    )
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/trainer.py "$@"\n')
    (tmp_path / "bin").mkdir()
    # The slow disk: a copy that writes half of each file, waits, and then the rest.
    slow = tmp_path / "bin" / "cp"
    slow.write_text('#!/bin/sh\nfor last; do :; done\n/bin/cp "$@"\nfind "$last" -name "*.safetensors" -exec truncate -s 100 {} +\n'
                    'sleep 7\nexec /bin/cp "$@"\n')  # fmt: skip
    for path in (program, slow):
        path.chmod(0o755)
    monkeypatch.setenv("TRAINER_PYTHON", str(program))
    monkeypatch.setattr("runs.flags.check_extra", lambda spec: None)
    spec = {"name": "Slow copy", "trigger": "t", "model": "tiny-flux", "backend": "diffusers", "max_train_steps": 1}
    folder = runs.create(runs.make({**spec, "save_dir": str(tmp_path / "local")}), tmp_path / "photos")
    env = {"HANGPROOF_DATA": str(tmp_path), "TRAINER_PYTHON": str(program)}
    env["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    code, _, err = finish(monitor(folder, **env))
    assert code == 0, err[-2000:]
    lora = folder / f"{folder.name}.safetensors"
    assert lora.stat().st_size > 4000, "never half a LoRA"
    assert status(folder)["restarts"] == 0
    assert [e["kind"] for e in events(folder) if e["kind"] != "ledger"][-1] in ("completed", "checkpoint")


def test_a_lora_that_does_not_verify_is_never_called_completed(tmp_path, monkeypatch):
    from monitor import recovery

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text('name = "run"\n')
    (folder / "run.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    supervisor = Supervisor(RunFolder(folder), False, None, ())
    try:
        supervisor.at = supervisor.at.__class__(State.RUNNING)
        assert "damaged" in recovery.complete(supervisor.run)
        (folder / "run.safetensors").unlink()
        assert "missing" in recovery.complete(supervisor.run)
    finally:
        supervisor.at = supervisor.at.__class__(State.FAILED)
        supervisor.close()


# ---- checkpoints that cannot be judged ----


def state_of(folder, step: int):
    final = folder / f"toy-step{step:08d}-state"
    with checkpoint.writing(final, step, 1) as temporary:
        (temporary / "optimizer.bin").write_bytes(b"weights")
    return final


def test_a_check_that_fails_falls_back_to_hashes_and_is_never_a_verdict(tmp_path, monkeypatch):
    """A broken torch in the monitor's environment, or no memory for the deep check, made every checkpoint "bad"."""
    path = state_of(tmp_path, 10)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("import os; os._exit(9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    point = checkpoints.choose([tmp_path], checkpoints.Verifier(60))
    assert point.path == path and not point.bad


def test_a_run_whose_checkpoints_cannot_be_verified_stops_with_the_reason_and_not_at_step_0(folder):
    toy_run(folder, fault_at(AT, "os.kill(os.getpid(), 9)"), **SHORT)
    place = folder.parent / "inject"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        "import os, sys\nif 'guards.checkpoint' in sys.orig_argv and 'verify' in sys.orig_argv:\n    os._exit(9)\n"
    )
    env = {"HANGPROOF_LIMITS": str(limits_file(folder, "[restart]\nbackoff_first_s = 0.2\nstart_s = 3\n"))}
    assert supervise(folder, PYTHONPATH=str(place), **env)[0] == 1
    now = status(folder)
    assert now["state"] == "failed" and "cannot be verified" in now["reason"] and now["attempt"] == 1
    assert checkpoint.newest_valid(folder).name == "toy-step00000030-state", "kept where it was"
    assert not list(folder.glob("*.bad")), "not called bad"


# ---- stops and pre-emptions ----


def test_further_sigterms_do_not_start_the_25_seconds_anew(folder):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(3600)"
    toy_run(folder, fault_at(AT, deaf), **SHORT)
    process = monitor(folder, HANGPROOF_LIMITS=str(limits_file(folder, "[phases.step]\nfloor_s = 120\n")))
    wait_for(lambda: step_of(folder) == AT)
    began = time.monotonic()
    for _ in range(4):
        process.send_signal(signal.SIGTERM)
        time.sleep(4)
    assert finish(process)[0] == 5
    assert time.monotonic() - began < 25
    assert status(folder)["state"] == "preempted" and trainers(folder) == []


def test_a_users_stop_that_is_followed_by_a_sigterm_stays_a_stop(tmp_path):
    folder = toy_run(tmp_path / "outputs" / "toy", HANG, **SHORT)
    env = {"HANGPROOF_DATA": str(tmp_path)}
    env["HANGPROOF_LIMITS"] = str(limits_file(folder, "[phases.step]\nfloor_s = 120\n[end]\npreempt_save_s = 2\n"))
    process = monitor(folder, **env)
    wait_for(lambda: step_of(folder) == AT)
    stop(folder, **env)
    wait_for(lambda: status(folder)["state"] == "stopping")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 3
    assert status(folder)["state"] == "stopped"
    command = [sys.executable, "-m", "monitor", "resume-all"]
    done = subprocess.run(command, cwd=ROOT, env=environment(folder, **env), capture_output=True, text=True, timeout=60)
    assert "no interrupted run" in done.stdout


def test_a_stop_survives_the_monitor_that_was_carrying_it_out(folder):
    toy_run(folder, HANG, **SHORT)
    env = {"HANGPROOF_LIMITS": str(limits_file(folder, "[phases.step]\nfloor_s = 120\n"))}
    process = monitor(folder, **env)
    wait_for(lambda: step_of(folder) == AT)
    stop(folder)
    wait_for(lambda: status(folder)["state"] == "stopping")
    old = status(folder)["monitor_pid"]
    kill_monitor(process, folder)
    process = monitor(folder, **env)
    wait_for(lambda: status(folder)["state"] == "stopping" and status(folder)["monitor_pid"] != old)
    stop(folder, "--now")
    assert finish(process)[0] == 3
    assert status(folder)["state"] == "stopped"


# ---- what is kept between two monitors ----


def test_the_kernels_oom_counters_of_the_start_are_kept_for_a_monitor_that_adopts(folder):
    """Without them every earlier out-of-memory kill of the machine was blamed on the attempt that ended unwatched."""
    toy_run(folder, steps=2000, pace=0.03, every=100)
    process = monitor(folder)
    wait_for(lambda: step_of(folder) > 5)
    kill_monitor(process, folder)
    current = RunState.load(RunFolder(folder)).current
    assert current is not None and current.oom_kills == collect_oom_kills()
    for pid in trainers(folder):
        os.kill(pid, signal.SIGKILL)
    process = monitor(folder)
    wait_for(lambda: incidents(folder))
    assert incidents(folder)[0]["cause"] != "host_out_of_memory"
    stop(folder, "--now")
    finish(process)


def collect_oom_kills():
    from monitor.diagnose import collect

    return collect.oom_kills()


def test_the_state_is_the_same_after_it_was_saved_and_loaded(tmp_path):
    folder = RunFolder(tmp_path)
    record = AttemptRecord("boot", 3, "token", "/tmp/x", 10, 1.5, (7, 8.0), {"/proc/vmstat": 2})
    saved = RunState(State.RECOVERING, 3, current=record, failure=Failure("hang", "0001"), shutdown=Shutdown("stopped"))
    assert saved.save(folder)
    assert RunState.load(folder) == saved


def test_a_file_of_the_first_version_keeps_what_a_user_has(tmp_path):
    old = {"version": 1, "state": "failed", "attempt": 4, "best_step": 90, "changes": [{"name": "workers_0", "sentence": "x"}],
           "was": ["workers_0"], "used": {"worker_stuck": 2}, "spec_mark": "abc", "asked_at": 5.0,
           "history": {"restarts": 2, "seen": {"a": 1}, "new_steps_s": 3.0}, "known": {}, "attempt_under_way": None}  # fmt: skip
    (tmp_path / "monitor.json").write_text(json.dumps(old))
    state = RunState.load(RunFolder(tmp_path))
    assert (state.state, state.attempt, state.best_step, state.spec_hash) == (State.FAILED, 4, 90, "abc")
    assert state.changes_at_save == ["workers_0"] and state.cause_counts == {"worker_stuck": 2}
    assert state.history.failures == {"a": 1}


def test_every_state_that_is_not_final_has_a_method(tmp_path):
    """An ending without a name once made the loop spin for ever with the GPU held."""
    supervisor = Supervisor(RunFolder(tmp_path), False, None, ())
    assert set(supervisor.states) == set(State) - FINAL
    supervisor.at = supervisor.at.__class__(State.FAILED)
    supervisor.close()


def test_a_monitor_that_is_killed_while_it_saves_the_end_has_shown_it(folder):
    toy_run(folder, **SHORT)
    code = "import os, signal\nreal = os.replace\ndef deadly(a, b, **k):\n    end = str(b).endswith('monitor.json') and b'completed' in open(a, 'rb').read()\n    real(a, b, **k)\n    if end:\n        os.kill(os.getpid(), signal.SIGKILL)\nos.replace = deadly"
    assert supervise(folder, **inject(folder, code))[0] == 0
    assert status(folder)["state"] == "completed"


def test_an_error_at_the_end_does_not_start_a_finished_run_again(folder):
    toy_run(folder, **SHORT)
    code = "import os\nreal = os.replace\ndef broken(a, b, **k):\n    if str(b).endswith('status.json') and b'completed' in open(a, 'rb').read():\n        raise OSError(5, 'Input/output error')\n    return real(a, b, **k)\nos.replace = broken"
    began = time.monotonic()
    assert supervise(folder, **inject(folder, code))[0] == 0
    assert time.monotonic() - began < 120
    assert len(events(folder, "started")) == 1 and weight(folder) == undisturbed(SHORT["steps"])
    lock = Lock(folder / "monitor.lock")
    assert lock.acquire()
    lock.release()


def test_a_keeper_that_cannot_receive_signals_says_so_and_starts_nothing(tmp_path, monkeypatch, capsys):
    from monitor import keeper

    def refuse(number, handler):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(keeper.signal, "signal", refuse)
    monkeypatch.setattr(keeper, "_Child", lambda command: pytest.fail("a monitor was started"))
    assert keeper.keep(["--before=0", str(tmp_path / "monitor.json"), str(tmp_path)]) == 1
    sentence = f"monitor: {tmp_path.name}: cannot receive signals: Cannot allocate memory; start it again\n"
    assert capsys.readouterr().err == sentence


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither call")
@pytest.mark.parametrize("call", ["signal.signal", "os.setsid"])
def test_a_monitor_that_fails_before_it_has_begun_is_started_again(call, monkeypatch, capsys):
    """Exit code 1 would mean that the run cannot be supervised, and the keeper would leave it unwatched."""
    from monitor import __main__ as entry
    from monitor import keeper

    def refuse(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(call, refuse)
    assert entry._child([str(os.getpid()), "folder"]) == keeper.EXIT_ERROR
    assert "No space left on device" in capsys.readouterr().err
