"""The monitor's parts one by one: causes, policy, signals, stacks, locks, checkpoints, limits, and what is shown."""

import io
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from monitor_helpers import ROOT, environment, finish, monitor, status, step_of, toy_run, wait_for

from guards import checkpoint
from monitor import (
    causes,
    checkpoints,
    clock,
    limits,
    notify,
    policy,
    queue,
    report,
    server,
    signals,
    stacks,
    system,
    tree,
)
from monitor import status as statuses
from monitor.attempt import Exit
from monitor.evidence import Evidence, late_rank
from monitor.folder import MonitorError, RunFiles, find
from monitor.locks import Lock, is_held
from monitor.signals import One, Sample

LINUX = sys.platform.startswith("linux")
LIMITS = limits.load()


def crash(log: str = "", **values) -> Evidence:
    return Evidence(kind="crash", phase=values.pop("phase", "step"), step=10, log_tail=log, **values)


def hang(stack: str = "", **values) -> Evidence:
    known = values.pop("stacks", {7: stack} if stack else {})
    return Evidence(kind="hang", phase=values.pop("phase", "step"), step=10, stacks=known, **values)


def frames(*names: str) -> str:
    """A faulthandler dump with these `file.py:function` frames."""
    lines = [f'  File "/x/{name.split(":")[0]}", line 1 in {name.split(":")[1]}' for name in names]
    return "Current thread 0x00007f (most recent call first):\n" + "\n".join(lines)


def rank(number: int, step: int = 5, phase: str = "step", silent: float = 9.0) -> dict:
    return {
        "rank": number, "pid": 100 + number, "phase": phase, "step": step, "done": 0, "total": 0, "note": "",
        "outcome": "running", "silent_s": silent,
    }  # fmt: skip


def proc(pid: int, state: str, trainer: bool = False, ppid: int = 1, wchan: str = "") -> dict:
    return {"pid": pid, "ppid": ppid, "name": "p", "state": state, "wchan": wchan, "cpu_s": 1.0, "trainer": trainer,
            "command": ""}  # fmt: skip


CAUSES = {
    "a worker that is stopped": (hang(processes=[proc(1, "S", True), proc(2, "T", ppid=1)]), "worker_stuck"),
    "a worker that sleeps": (hang(frames("queues.py:get", "dataloader.py:_try_get_data")), "worker_stuck"),
    "a loader deadline": (crash("RuntimeError: DataLoader timed out after 60 seconds"), "worker_stuck"),
    "a worker killed": (
        crash("RuntimeError: DataLoader worker (pid 71) is killed by signal: Killed."),
        "worker_killed",
    ),
    "npz stalled": (hang(frames("zipfile.py:read", "_npyio_impl.py:__getitem__")), "npz_stalled"),
    "an npz deadline": (crash(note="waited 30 s for cat_512_flux.npz", outcome="deadline"), "npz_stalled"),
    "npz corrupt": (crash("zipfile.BadZipFile: Bad CRC-32 for file 'latents.npy'"), "npz_corrupt"),
    "block swap": (hang(frames("threading.py:wait", "custom_offloading_utils.py:_wait_blocks_move")), "block_swap"),
    "CUDA after fork": (crash("RuntimeError: Cannot re-initialize CUDA in forked subprocess."), "cuda_after_fork"),
    "a late rank": (hang(ranks=[rank(0, 9), rank(1, 8)]), "collective"),
    "a barrier": (hang(frames("distributed_c10d.py:barrier")), "collective"),
    "a collective timeout": (crash("[rank0]: Watchdog caught collective operation timeout: WorkNCCL"), "collective"),
    "the tracker": (hang(frames("wandb_init.py:init"), phase="load"), "tracker_start"),
    "the hub": (hang(frames("socket.py:readinto", "file_download.py:http_get"), phase="load"), "hub"),
    "no network": (crash("LocalEntryNotFoundError: cannot find the file on the Hub", phase="load"), "hub"),
    "sampling": (hang(phase="sample"), "sampling"),
    "a slow save": (hang(phase="save"), "save_slow"),
    "an exit that hangs": (hang(outcome="done", phase="end"), "exit"),
    "CUDA memory": (crash("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"), "cuda_out_of_memory"),
    "host memory": (crash(signal=9, host={"oom_kills": 1}), "host_out_of_memory"),
    "host memory by the kernel's log": (
        crash(signal=9, kernel=["Out of memory: Killed process 71"]),
        "host_out_of_memory",
    ),
    "a killer": (crash(signal=9), "killed"),
    "a killer behind a launcher": (crash("died with <Signals.SIGKILL: 9>.", exit_code=1), "killed"),
    "a full disk": (crash("OSError: [Errno 28] No space left on device"), "disk_full"),
    "NaN": (crash("RuntimeError: NaN detected in loss at step 12"), "nan_loss"),
    "Xid": (
        crash("RuntimeError: CUDA error", kernel=["NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off"]),
        "gpu_lost",
    ),
    "a lost GPU": (crash("Unable to determine the device handle: GPU is lost."), "gpu_lost"),
    "a driver mismatch": (crash("Failed to initialize NVML: Driver/library version mismatch"), "driver_mismatch"),
    "a segfault": (crash(signal=11), "crashed_in_c"),
    "an exception": (crash("Traceback (most recent call last):\n  x\nKeyError: 'lora'"), "exception"),
    "a deadline inside": (crash(note="the next batch", outcome="deadline"), "deadline"),
    "D state": (hang(processes=[proc(1, "D", True, wchan="folio_wait_bit")]), "unkillable"),
    "SIGSTOP": (hang(processes=[proc(1, "T", True)]), "trainer_stopped"),
    "caching": (hang(phase="cache_latents", note="cat.png"), "caching"),
    "nothing known": (hang(frames("loop.py:one_step")), "stuck"),
    "silence": (crash(ended="exit code 1"), "no_last_word"),
}


@pytest.mark.parametrize("what", CAUSES)
def test_the_cause_of(what):
    evidence, name = CAUSES[what]
    cause = causes.match(evidence)
    assert cause.name == name
    assert cause.title and cause.explanation and "{" not in cause.title + cause.explanation + cause.advice


def test_every_cause_has_words_and_every_rung_of_a_ladder_exists():
    from runs.mitigate import MITIGATIONS

    for row in causes.table():
        assert row["title"][0].isupper() and row["explanation"].endswith((".", "}")), row["name"]
        assert set(row.get("ladder", ())) <= set(MITIGATIONS), row["name"]
        for pattern in (*row["match"].get("log", ()), *row["match"].get("note", ())):
            re.compile(pattern)
    assert causes.table()[-1]["match"] == {}


def test_the_launchers_own_error_does_not_hide_the_trainings():
    log = (
        "Traceback (most recent call last):\nValueError: the LoRA is empty\nTraceback (most recent call last):\n"
        "subprocess.CalledProcessError: Command '['python3', '-m', 'trainer']' returned non-zero exit status 1.\n"
    )
    assert causes.last_error(log) == "ValueError: the LoRA is empty"
    assert causes.last_error("") == "the log is empty"


def test_the_place_of_a_hang_is_the_ranks_not_a_workers():
    waits, works = frames("selectors.py:select"), frames("loop.py:one_step")
    found = hang(ranks=[rank(0), rank(1)], rank=1, stacks={50: waits, 101: works, 100: frames("loop.py:barrier")})
    assert found.where() == "one_step (loop.py:1)"
    assert "one_step" in causes.match(hang(ranks=[rank(0)], stacks={50: waits, 100: works})).explanation
    assert hang(ranks=[rank(0)], stacks={50: waits}).where() == ""
    assert hang(stacks={50: waits}).where() == "select (selectors.py:1)", "a script without ranks"


def test_the_late_rank_is_the_one_behind_or_the_one_elsewhere_or_the_one_silent_longest():
    assert late_rank([rank(0)]) is None
    assert late_rank([rank(0, 9), rank(1, 8), rank(2, 9)])["rank"] == 1
    assert late_rank([rank(0), rank(1), rank(2, phase="save")])["rank"] == 2
    assert late_rank([rank(0, silent=5.0), rank(1, silent=9.0)])["rank"] == 1
    assert late_rank([rank(0, silent=9.0), rank(1, silent=9.1)]) is None


# ---- policy ----


def test_the_first_failure_is_answered_at_once_then_10_20_and_the_third_of_one_kind_ends_the_run():
    history = policy.History()
    plans = [policy.after_failure(history, "step/9/stuck", n == 0, False, LIMITS.restart) for n in range(3)]
    assert [p.wait_s for p in plans[:2]] == [0, 10]
    assert "3 times without one new step" in plans[2].stop


def test_a_run_that_makes_new_steps_restarts_at_once_up_to_ten_times():
    history = policy.History()
    plans = [policy.after_failure(history, f"step/{n}/stuck", True, False, LIMITS.restart) for n in range(11)]
    assert all(p.wait_s == 0 and not p.stop for p in plans[:10])
    assert "10 restarts are spent" in plans[10].stop


def test_ten_minutes_of_new_steps_give_the_allowance_back():
    history = policy.History()
    for n in range(10):
        policy.after_failure(history, f"step/{n}/stuck", True, False, LIMITS.restart)
    assert not history.progressed(599, LIMITS.restart)
    assert history.progressed(1, LIMITS.restart)
    assert policy.after_failure(history, "step/99/stuck", True, False, LIMITS.restart).stop == ""


def test_failures_of_changing_kinds_end_too_and_waiting_grows_to_five_minutes():
    history, waits = policy.History(), []
    for n in range(5):
        plan = policy.after_failure(history, f"load/0/cause-{n}", False, False, LIMITS.restart)
        waits.append(plan.wait_s)
    assert waits[:4] == [0, 10, 20, 40] and plan.stop
    changing = policy.History()
    waits = [policy.after_failure(changing, "load/0/oom", False, True, LIMITS.restart).wait_s for _ in range(10)]
    assert waits[-1] == 300, "while something is changed, the run goes on"
    assert policy.after_failure(changing, "load/0/oom", False, True, LIMITS.restart).stop


def test_a_cause_that_needs_time_gets_it_on_the_first_failure_too():
    assert policy.after_failure(policy.History(), "x", True, False, LIMITS.restart, least_wait_s=30).wait_s == 30


# ---- limits ----


def test_the_times_of_a_pre_emption_fit_into_25_seconds():
    end = LIMITS.end
    assert end.preempt_save + end.preempt_grace + end.preempt_kill <= 23


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[watch]\nexitt = 3", "has no 'exitt'"),
        ("[wacht]\nexit = 3", "no section [wacht]"),
        ("[phases.steps]\nfloor = 3", "no phase 'steps'"),
        ("[end]\ngrace = -1", "0 or more"),
        ("[end]\ngrace = 'x'", "a number of seconds"),
        ("[end", "cannot read"),
    ],
)
def test_a_wrong_limits_file_is_refused_by_name(tmp_path, text, words):
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(limits.LimitsError, match=re.escape(words)):
        limits.load(path)


# ---- signals ----

TRAINER, WORKER = (1, 10.0), (2, 11.0)


def sample(at: float, trainer: One, worker: One | None = None, stacks_text: str = "same", **more) -> Sample:
    processes = {TRAINER: trainer} | ({WORKER: worker} if worker else {})
    return Sample(at, processes, stacks=stacks_text, **more)


def one(state: str = "S", cpu: float = 0.0, **more) -> One:
    return One(state, "python", cpu, more.pop("faults", 0), **more)


def compare(first: Sample, second: Sample, **more) -> signals.Signals:
    return signals.compare(first, second, [1], **more)


def test_asleep_twice_on_the_same_stack_without_cpu_speaks_for_a_hang():
    found = compare(sample(0, one()), sample(2, one()))
    assert "same stack twice" in found.stuck[0] and not found.slow


def test_a_busy_loop_on_the_same_stack_says_nothing_either_way():
    assert compare(sample(0, one("R")), sample(2, one("R", cpu=2.0))) == signals.Signals()


def test_asleep_on_changing_stacks_says_nothing():
    assert compare(sample(0, one()), sample(2, one(), stacks_text="other")) == signals.Signals()


def test_a_stopped_worker_speaks_for_a_hang_whatever_the_trainer_does():
    found = compare(sample(0, one("R"), one("T")), sample(2, one("R", cpu=2.0), one("T")))
    assert "stopped by a signal" in found.stuck[0]


def test_reading_files_is_slow_not_stuck():
    found = compare(sample(0, one("D")), sample(2, one("D", disk_bytes=10_000_000)))
    assert "MB/s" in found.slow[0] and not found.stuck


def test_a_disk_that_gives_nothing_is_stuck():
    found = compare(sample(0, one("D")), sample(2, one("D", wchan="folio_wait_bit")))
    assert any("uninterruptible" in s and "folio_wait_bit" in s for s in found.stuck)


def test_swapping_throttling_and_a_busy_machine_are_slow():
    swapping = compare(sample(0, one("D")), sample(2, one("D", cpu=1.0, faults=500), swapped_pages=5000))
    assert "swapping" in swapping.slow[0]
    hot = ({"utilization": 99, "throttle": "too hot"},)
    throttled = compare(sample(0, one("R")), sample(2, one("R", cpu=2.0), gpu=hot))
    assert "throttled" in throttled.slow[0]
    spilled = ({"utilization": 99, "spill": True, "memory_used": 99, "memory_total": 100},)
    assert "spills" in compare(sample(0, one("R")), sample(2, one("R", cpu=2.0), gpu=spilled)).slow[0]
    busy = sample(2, one("R", cpu=0.8, starved_s=1.2))
    assert "keep the processor busy" in compare(sample(0, one("R")), busy).slow[0]
    assert compare(sample(0, one("R")), busy, enough_cpu=True).slow == (), "it had the time of many steps"


def test_samples_of_living_processes_tell_a_sleeper_from_a_spinner():
    programs = {"sleeps": "import time; time.sleep(60)", "spins": "while True: pass"}
    children = {name: subprocess.Popen([sys.executable, "-c", code]) for name, code in programs.items()}
    try:
        time.sleep(0.5)
        keys = {name: (c.pid, system.proc(c.pid).start) for name, c in children.items()}
        first = {name: signals.take([key]) for name, key in keys.items()}
        time.sleep(1.0)
        found = {n: signals.compare(first[n], signals.take([keys[n]]), [keys[n][0]], enough_cpu=True) for n in keys}
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    assert any("no CPU time used" in s for s in found["sleeps"].stuck)
    assert found["spins"] == signals.Signals()


# ---- stacks ----


def test_names_and_places_are_read_from_faulthandler_and_from_py_spy():
    text = frames("threading.py:wait", "loop.py:one_step")
    assert stacks.names(text) == ["threading.py:wait", "loop.py:one_step"]
    assert stacks.where(text) == "wait (threading.py:1)"
    spy = 'Thread 7 (idle): "MainThread"\n    wait (threading.py:327)\n    one_step (trainer/loop.py:80)\n'
    assert stacks.names(spy) == ["threading.py:wait", "loop.py:one_step"]
    assert stacks.where(spy) == "wait (threading.py:327)"
    assert stacks.where("py-spy is not installed") == ""
    other = 'Thread 0x00007e (most recent call first):\n  File "/x/selectors.py", line 415 in select\n\n'
    assert stacks.where(other + text) == "wait (threading.py:1)"
    assert stacks.where(other) == "", "cut off before the main thread"


def test_no_signal_is_sent_to_a_process_that_has_no_handler_for_it(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert stacks.dump(tmp_path, [(child.pid, system.proc(child.pid).start)], 0.2) == {}
        assert child.poll() is None, "SIGUSR2 without a handler would have ended it"
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(not LINUX, reason="the stand-in for py-spy is a shell script")
@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("sleep 60", "no answer within"),
        ("echo 'Permission Denied: Try running again with elevated permissions'; exit 1", "Permission Denied"),
        ("kill -STOP $4; echo 'Thread 1: MainThread'", "MainThread"),
        (None, "not installed"),
    ],
)
def test_py_spy_that_hangs_is_denied_missing_or_leaves_its_target_stopped(tmp_path, monkeypatch, script, answer):
    (tmp_path / "bin").mkdir()
    if script:
        (tmp_path / "bin" / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / "py-spy").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    child = subprocess.Popen(["sleep", "60"])
    try:
        spy = stacks.PySpy(timeout_s=0.5)
        spy.begin(child.pid, system.proc(child.pid).start)
        wait_for(lambda: not spy.poll(), 5)
        assert answer in spy.texts[child.pid]
        wait_for(lambda: system.proc(child.pid).state == "S", 5, "the target runs again")
    finally:
        child.kill()
        child.wait()


# ---- processes and locks ----


def test_a_process_is_known_by_number_and_start():
    child = subprocess.Popen(["sleep", "60"])
    start = system.proc(child.pid).start
    assert system.alive(child.pid, start) and not system.alive(child.pid, start + 1)
    assert not system.send(child.pid, start + 1, 15), "a number that was used again is not ours to signal"
    child.kill()
    wait_for(lambda: system.proc(child.pid).dead, 5, "a zombie is dead")
    assert not system.alive(child.pid, start)
    child.wait()
    assert system.proc(child.pid) is None


@pytest.mark.skipif(not LINUX, reason="/proc/PID/environ")
def test_processes_are_found_by_the_token_they_inherited_and_ended():
    env = {**os.environ, tree.TOKEN: "test-token-1"}
    child = subprocess.Popen(["bash", "-c", "trap '' TERM; sleep 61 & wait; wait"], env=env, start_new_session=True)
    found = tree.Tree("test-token-1", (child.pid, system.proc(child.pid).start))
    wait_for(lambda: len(found.refresh()) == 2, 5)
    ended = tree.end(found, grace_s=0.3, kill_wait_s=5)
    assert {p.name for p in ended.killed} == {"bash", "sleep"} and ended.left == ()
    assert child.wait(5) == -9, "parents are ended first"


def test_a_lock_goes_with_its_holder(tmp_path):
    path = tmp_path / "lock"
    code = f"from monitor.locks import Lock; from pathlib import Path; import time; assert Lock(Path({str(path)!r})).acquire(); print(1, flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    holder.stdout.readline()
    mine = Lock(path)
    assert is_held(path) and not mine.acquire()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert not is_held(path)
    assert mine.acquire(patience_s=1)
    assert not Lock(path).acquire()
    mine.release()


def test_the_gpus_of_a_run_come_from_the_environment_and_its_spec(monkeypatch):
    monkeypatch.delenv("HANGPROOF_GPUS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert queue.devices({}) == ["2"] and queue.devices({"gpus": 2}) == ["2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert queue.devices({}) == []
    monkeypatch.setenv("HANGPROOF_GPUS", "a")
    assert queue.devices({}) == ["a"]


# ---- checkpoints ----


def state(folder: Path, step: int, data: bytes = b"weights") -> Path:
    final = folder / f"toy-step{step:08d}-state"
    with checkpoint.writing(final, step, 1) as temporary:
        (temporary / "model.bin").write_bytes(data)
    return final


def test_the_newest_good_state_is_chosen_bad_newer_ones_are_set_aside_older_ones_left(tmp_path):
    paths = [state(tmp_path, n) for n in (10, 20, 30)]
    (paths[2] / "model.bin").write_bytes(b"\0" * 7)
    chosen = checkpoints.choose([tmp_path], checkpoints.Verifier(60))
    assert chosen.path == paths[1] and chosen.step == 20
    assert "not those that were written" in chosen.bad[0][1]
    assert sorted(p.name for p in tmp_path.glob("*-state")) == [paths[0].name, paths[1].name]


def test_a_state_that_cannot_be_checked_in_time_is_passed_over_and_not_touched(tmp_path):
    path = state(tmp_path, 10)
    os.mkfifo(path / "stalled.bin") if hasattr(os, "mkfifo") else pytest.skip("a fifo stands in for a dead disk")
    guard = json.loads((path / checkpoint.GUARD).read_text())
    guard["files"]["stalled.bin"] = {"size": 0, "sha256": ""}
    (path / checkpoint.GUARD).write_text(json.dumps(guard))
    chosen = checkpoints.choose([tmp_path], checkpoints.Verifier(1.0))
    if chosen.path is None and "could not be read" in chosen.bad[0][1]:
        assert path.is_dir()
    else:  # a fifo is no file: it is refused before it is read
        assert "missing" in chosen.bad[0][1]


def test_a_verification_that_was_begun_is_not_done_again(tmp_path):
    path = state(tmp_path, 10)
    verifier = checkpoints.Verifier(60)
    verifier.begin(path)
    wait_for(lambda: verifier.poll() or verifier._answers, 20)
    began = time.monotonic()
    assert checkpoints.choose([tmp_path], verifier).path == path
    assert time.monotonic() - began < 0.05
    (path / "model.bin").write_bytes(b"changed!")
    assert checkpoints.choose([tmp_path], verifier).path is None, "a changed state is another question"


def test_room_for_two_checkpoints_is_asked_for(tmp_path):
    assert checkpoints.room_missing([tmp_path], floor=0) == ""
    missing = checkpoints.room_missing([tmp_path], floor=1 << 60)
    assert "two checkpoints need" in missing and str(tmp_path) in missing


# ---- what is shown ----


def test_exit_codes_and_last_words():
    assert Exit(0, None, "", "").done, "a script without heartbeats"
    assert not Exit(0, None, "running", "").done, "exit code 0 alone does not count"
    assert Exit(1, None, "done", "").done, "a launcher's code is only a hint"
    assert str(Exit(137, 9, "running", "")) == "ended by SIGKILL"
    assert "waited for a batch" in str(Exit(75, None, "deadline", "waited for a batch"))


def test_a_folder_without_a_script_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    with pytest.raises(MonitorError, match="train.sh"):
        find(tmp_path)
    folder = toy_run(tmp_path / "outputs" / "my-lora")
    assert find(folder) == folder
    code, _, err = finish(monitor(Path("no-such-run"), "status", HANGPROOF_DATA=str(tmp_path)))
    assert code == 1 and "no-such-run" in err


def test_status_says_whether_somebody_watches(tmp_path):
    files = RunFiles(tmp_path)
    assert statuses.read(tmp_path) is None
    files.status({"state": "running", "name": "x"})
    assert statuses.read(tmp_path)["alive"] is False and statuses.left_alone(statuses.read(tmp_path))
    lock = Lock(tmp_path / "monitor.lock")
    lock.acquire()
    assert statuses.read(tmp_path)["alive"] is True
    lock.release()
    files.status({"state": "completed", "name": "x"})
    assert not statuses.left_alone(statuses.read(tmp_path))


def example_status(**values) -> dict:
    base = {
        "name": 'my "lora"', "state": "running", "alive": True, "step": 12, "planned_steps": 100, "step_s": 0.5,
        "loss": 0.25, "eta_s": 44.0, "attempt": 2, "restarts": 1, "incidents": 1, "phase": "step", "epoch": 1,
        "last_progress_at": "2026-01-02T03:04:05.500Z", "updated_at": "2026-01-02T03:04:06.000Z", "message": "",
    }  # fmt: skip
    return {**base, **values}


def test_prometheus_text_names_every_run_and_escapes_its_name():
    page = server.text([example_status()])
    assert 'hangproof_step{run="my \\"lora\\""} 12\n' in page
    assert 'hangproof_state{run="my \\"lora\\"",state="running"} 1\n' in page
    assert 'hangproof_state{run="my \\"lora\\"",state="failed"} 0\n' in page
    assert "# TYPE hangproof_restarts_total counter\n" in page
    assert 'hangproof_last_progress_timestamp_seconds{run="my \\"lora\\""} 1767323045.5' in page
    assert server.text([]) == "\n"


def test_metrics_are_served_on_this_machine_only_and_other_paths_say_so(tmp_path):
    folder = toy_run(tmp_path / "outputs" / "toy")
    RunFiles(folder).status(example_status(name="toy"))
    command = [sys.executable, "-m", "monitor", "metrics", "--port", "0", "--json"]
    env = environment(folder, HANGPROOF_DATA=str(tmp_path))
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    try:
        process.stdout.readline()
        port = json.loads(process.stdout.readline())["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert 'hangproof_step{run="toy"} 12' in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=10)
        assert [c.laddr.ip for c in psutil.Process(process.pid).net_connections() if c.status == "LISTEN"] == [
            "127.0.0.1"
        ]
    finally:
        process.kill()
        process.communicate()


def test_the_live_table_shows_a_run(tmp_path):
    from rich.console import Console

    from monitor import screen

    folder = toy_run(tmp_path / "toy")
    RunFiles(folder).status(example_status())
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(screen.table([folder, tmp_path / "other"], time.time()))
    shown = console.export_text()
    assert "12/100" in shown and "left alone" in shown and "not started" in shown


@pytest.mark.skipif(not LINUX, reason="/proc")
def test_diagnose_explains_a_living_run_and_any_process(tmp_path):
    folder = toy_run(tmp_path / "toy", "def fault(step):\n    if step == 5:\n        time.sleep(3600)\n")
    env = {"HANGPROOF_LIMITS": str(tmp_path / "limits.toml")}
    (tmp_path / "limits.toml").write_text("[phases.step]\nfloor = 600\n")
    process = monitor(folder, **env)
    try:
        wait_for(lambda: step_of(folder) == 5)
        code, out, _ = finish(monitor(folder, "diagnose", "--json", **env))
        assert code == 0
        found = json.loads(out.splitlines()[-1])
        assert found["summary"] == "it stands still" and found["step"] == 5
        assert "fault (toy.py" in found["where"] and "fault" in out
        pid = found["processes"][-1]["pid"]
        code, out, _ = finish(monitor(Path(str(pid)), "diagnose", **env))
        assert code == 0 and "it stands still" in out and "hrtimer_nanosleep" in out
    finally:
        finish(monitor(folder, "stop", "--now"))
        finish(process)
    assert status(folder)["state"] == "stopped"
    code, _, err = finish(monitor(folder, "diagnose"))
    assert code == 1 and "nothing of it runs" in err


# ---- notifications ----


@pytest.fixture
def listener():
    """A server that keeps what it is sent; stands in for a chat service."""
    import http.server
    import threading

    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made.server_port, got
    made.shutdown()
    made.server_close()


def test_people_are_told_of_a_hang_and_of_the_end_and_their_addresses_stay_secret(tmp_path, listener):
    port, got = listener
    config = tmp_path / "notify.toml"
    config.write_text(f'urls = ["json://user:s3cr3t-token@127.0.0.1:{port}/"]\n')
    config.chmod(0o600)
    folder = toy_run(tmp_path / "toy", "def fault(step):\n    if step == 34 and attempt == 1:\n        time.sleep(3600)\n",
                     steps=50, pace=0.03, every=10)  # fmt: skip
    assert finish(monitor(folder, HANGPROOF_NOTIFY=str(config)))[0] == 0
    titles = sorted(json.loads(text)["title"] for text in got)
    assert titles == ["toy: completed", "toy: hang", "toy: restarted"]
    for path in folder.rglob("*"):
        if path.is_file():
            assert b"s3cr3t-token" not in path.read_bytes(), path


def test_a_notification_file_that_others_can_read_is_refused_without_showing_it(tmp_path):
    config = tmp_path / "notify.toml"
    config.write_text('urls = ["json://user:s3cr3t-token@127.0.0.1:1/"]\n')
    config.chmod(0o644)
    with pytest.raises(notify.NotifyError, match="chmod 600") as refused:
        notify.read_config(config)
    assert "s3cr3t" not in str(refused.value)
    config.write_text("urls = [json://s3cr3t-token")
    config.chmod(0o600)
    with pytest.raises(notify.NotifyError, match="not a TOML file") as refused:
        notify.read_config(config)
    assert "s3cr3t" not in str(refused.value)


def test_durations_and_times_read_well():
    assert [report.duration(s) for s in (3.21, 310, 7500)] == ["3.2 s", "5 min 10 s", "2 h 5 min"]
    assert clock.utc(0.5) == "1970-01-01T00:00:00.500Z"
