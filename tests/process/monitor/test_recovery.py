"""How an attempt is started, what prevents that, what makes a run complete, and two machines that train one run."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from machines_helpers import AGAIN, together
from monitor_evidence import LORA, beat, open_incident, saved_state
from monitor_helpers import ROOT, environment, events, finish, limits_file, monitor, supervise, toy, toy_run, wait_for
from proc_helpers import linux
from run_facts import incidents, report, status, step_of, weight
from runs_helpers import executable, pictures, written
from toys import fault_at, undisturbed

import runs
from monitor import config, recovery, state as states
from monitor.attempt import Attempt, kill_leftovers
from monitor.diagnose.incident import Incident
from monitor.process import platform, spawned
from monitor.resume import checkpoints, next_attempt
from monitor.resume.next_attempt import Rendered
from monitor.run_folder import MonitorError, RunFolder
from monitor.state import ResumePoint, RunState, Shutdown, State, Transition
from runs.pin import pinned
from runs.scripts import rendered

ENV = "env | grep HANGPROOF >env.txt\n"


def script(run, text: str = ""):
    path = written(run.folder.folder / "train.sh", ENV + text)
    return path


def ended(attempt: Attempt) -> None:
    wait_for(lambda: attempt.poll(platform.now(), 0.0, fresh=True).ended, 60, "the end of the script")
    attempt.close()


def test_an_attempt_starts_from_the_newest_good_state_and_its_record_is_saved(make_loop):
    run = make_loop("")
    script(run, "kill -0 $$; sleep 60")
    good, bad = saved_state(run.folder.folder, 10), saved_state(run.folder.folder, 20)
    (bad / "weights").write_bytes(b"changed")
    (run.folder.folder / "toy.tmp").mkdir()
    run.state.best_step, run.state.changes, run.tries = 25, [{"name": "one", "sentence": "s"}], 2
    open_incident(run)
    attempt = recovery.start_attempt(run)
    try:
        assert isinstance(attempt, Attempt) and attempt.record.number == 2, "attempt 1 is train.sh from step 0"
        saved = RunState.load(run.folder)
        assert saved == run.state and saved.current == attempt.record and run.tries == 0
        assert (saved.attempt, saved.best_step, saved.resumed_step, saved.changes_at_save) == (2, 25, 10, ["one"])
        found = Incident.load(run.incident.folder)
        assert (found.resumed_from, found.from_memory, found.standby) == (10, False, False)
        assert found.bad_checkpoints[0].startswith(f"{bad.name}.bad") or found.bad_checkpoints[0].startswith(bad.name)
        (restarted,), (told,) = events(run.folder.folder, "restarted"), events(run.folder.folder, "checkpoint_bad")
        assert restarted["message"] == f"attempt 2 from step 10 ({good.name}), pid {attempt.pid}"
        assert (restarted["step"], restarted["attempt"], restarted["changes"]) == (10, 2, ["one"])
        assert bad.name in told["message"] and "its content has changed since it was written" in told["message"]
        variables = wait_for((run.folder.folder / "env.txt").read_text, 60)
        assert f"HANGPROOF_RESUME={good}" in variables and "HANGPROOF_ATTEMPT=2" in variables
        assert f"attempt 2: train.sh, from {good}" in (run.folder.folder / "training.log").read_text()
        # Another start, such as after an error of the monitor, kills it first.
        assert recovery.start_attempt(run).record.number == 3
        killed = events(run.folder.folder, "killed")[0]
        assert killed["message"].startswith("killing what an earlier attempt left: ")
        assert str(attempt.pid) in killed["message"]
        assert not psutil.pid_exists(attempt.pid) or psutil.Process(attempt.pid).status() == "zombie"
    finally:
        kill_leftovers(run)
        assert not spawned.with_environment(spawned.RUN, str(run.folder.folder))


def test_a_leftover_that_is_forked_during_the_kill_is_killed_too(make_loop, monkeypatch):
    run, kill = make_loop(""), spawned.kill
    marks = {spawned.RUN: str(run.folder.folder), spawned.TOKEN: "0" * 32}
    left = []

    def fork(*_, **__):
        left.append(subprocess.Popen(["sleep", "60"], env=os.environ | marks))

    fork()
    monkeypatch.setattr(spawned, "kill", lambda *given: (kill(*given), len(left) < 2 and fork())[0])
    kill_leftovers(run)
    assert len(left) == 2 and all(process.wait(10) < 0 for process in left)


def test_the_first_attempt_starts_at_step_0_and_a_script_that_cannot_run_is_tried_again(make_loop, monkeypatch):
    run = make_loop("")
    script(run)
    with monkeypatch.context() as patch:
        patch.setattr(platform, "popen", lambda *_, **__: (_ for _ in ()).throw(OSError(12, "Cannot allocate memory")))
        refused = recovery.start_attempt(run)
    assert refused.state is State.BACKOFF and refused.message == "attempt 1 cannot be started: Cannot allocate memory"
    assert run.state.current is None and run.state.attempt == 0
    attempt = recovery.start_attempt(run)
    assert isinstance(attempt, Attempt) and attempt.record.number == 1
    ended(attempt)
    assert "HANGPROOF_RESUME" not in (run.folder.folder / "env.txt").read_text()
    (started,) = events(run.folder.folder, "started")
    assert started["message"] == f"attempt 1 from the start, pid {attempt.pid}" and "changes" not in started


def test_without_trackio_an_event_says_how_to_install_it(make_loop, tmp_path, monkeypatch):
    (tmp_path / "trackio.py").write_text("raise ImportError('No module named trackio')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = make_loop('trackers = "trackio"\n')
    recovery.start_tracker(run.folder)
    wait_for(lambda: "pip install trackio" in (run.folder.folder / "events.jsonl").read_text(), what="the event")


def test_a_state_that_cannot_be_verified_now_is_waited_for_and_never_means_step_0(make_loop, monkeypatch):
    run = make_loop("")
    script(run)
    old, new = saved_state(run.folder.folder, 10), saved_state(run.folder.folder, 20)
    for chosen, tries, starts in ((None, 9, False), (old, 0, False), (old, 4, True)):
        point = ResumePoint(chosen, 10, unsure=((new, "no answer"),))
        monkeypatch.setattr(checkpoints, "choose", lambda *_, point=point: point)
        run.tries, run.wait_limit_s = tries, CONFIG.restart.start_s
        run.tries_since_s = time.monotonic()
        result = recovery.start_attempt(run)
        assert isinstance(result, Attempt) is starts, (chosen, tries)
        if not starts:
            assert result.state is State.BACKOFF
            assert result.message.startswith(f"{new.name} cannot be verified: no answer. It is kept")
    ended(result)
    assert f"{new.name} cannot be verified now and is kept" in (run.folder.folder / "monitor.log").read_text()


def test_a_change_that_states_do_not_fit_keeps_them_aside_and_starts_over(make_loop, monkeypatch):
    run = make_loop("")
    path, state = script(run), saved_state(run.folder.folder, 10)
    monkeypatch.setattr(run.prewarm, "render", lambda *_: Rendered(path, "", compatible=False))
    run.state.best_step = 30
    attempt = recovery.start_attempt(run)
    ended(attempt)
    assert not state.exists() and (state.parent / f"{state.name}.bad").is_dir()
    assert (run.state.best_step, run.state.resumed_step) == (0, 0)
    assert f"kept as {state.name}.bad" in events(run.folder.folder, "checkpoint_bad")[0]["message"]
    assert "HANGPROOF_RESUME" not in (run.folder.folder / "env.txt").read_text()


def test_another_machine_takes_its_changes_from_the_first(make_loop, monkeypatch):
    first = make_loop("nodes = 2\n", machine=0)
    first.state.changes, first.state.changes_at_save = [{"name": "batch_1", "sentence": "s"}], ["batch_1"]
    first.state.save(first.folder)
    second, seen = make_loop("nodes = 2\n", machine=1), []
    state = second.state
    monkeypatch.setenv(next_attempt.CHECKED, "1")
    rendered_for = lambda *_: seen.append((state.changes, state.changes_at_save)) or Rendered(script(second))  # noqa: E731
    monkeypatch.setattr(second.prewarm, "render", rendered_for)
    attempt = recovery.start_attempt(second)
    ended(attempt)
    assert seen == [(first.state.changes, ["batch_1"])]


FORK = """
if sys.argv[sys.argv.index("--max_data_loader_n_workers") + 1] != "0":
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use spawn")
"""


@pytest.mark.slow
@linux
def test_a_certain_cause_is_changed_at_the_first_restart_and_the_spec_stays_the_users(tmp_path, monkeypatch):
    (tmp_path / "trainer.py").write_text(toy(fault_at(25, FORK, "True"), steps=40, pace=0.02, every=10))
    # What accelerate would start: it fails as the trainer's flags say it must.
    text = f'#!/bin/sh\nexec {sys.executable} {tmp_path}/trainer.py "$@"\n'
    env = {"HANGPROOF_DATA": str(tmp_path), "TRAINER_PYTHON": str(executable(tmp_path / "accelerate", text))}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    # The toy takes sd-scripts' flags too; which backend has which needs its checkout.
    monkeypatch.setattr("runs.folders.check_extra", lambda spec: None)
    made = {"name": "Ladder 1", "trigger": "t", "model": "tiny-flux", "backend": "diffusers", "max_train_steps": 40}
    folder = runs.create(runs.make({**made, "workers": 2}), pictures(tmp_path / "photos", 1))
    # This toy does not wait at the gate: as a standby it would train, and write states of its own.
    limits = "[restart]\nbackoff_first_s = 0.1\n[phases.step]\nfloor_s = 30\n[standby]\ntries_count = 0\n"
    assert supervise(folder, limits, **env)[0] == 0
    now = status(folder)
    assert (now["state"], now["restarts"], now["name"]) == ("completed", 1, "Ladder 1")
    (incident,) = incidents(folder)
    assert incident["cause"] == "cuda_after_fork" and incident["resumed_from"] == 20
    assert len(incident["changed"]) == 1 and "worker processes" in incident["changed"][0]
    assert now["changes"] == incident["changed"] and events(folder, "mitigated")[0]["change"] == "workers_0"
    assert f"Changed: {incident['changed'][0]}" in report(folder)
    assert "workers = 2" in (folder / "run.toml").read_text(), "the original is kept"
    first, second = (folder / "train.sh").read_text(), (folder / "train.attempt-2.sh").read_text()
    assert "--max_data_loader_n_workers 2" in first and "--max_data_loader_n_workers 0" in second
    assert "step00000020-state" in second and "--resume" not in first
    (mitigated,), (again,) = events(folder, "mitigated"), events(folder, "restarted")
    assert mitigated["patch"]["commands"]["0"]["flags"]["max_data_loader_n_workers"] == 0
    assert "spec" not in mitigated["patch"] and again["changes"] == ["workers_0"]
    (change,) = RunState.load(RunFolder(folder)).changes
    job = pinned(folder).patched(change["patch"])
    assert (pinned(folder).spec["workers"], job.spec["workers"]) == (2, 0), "the job itself stays"
    assert rendered(job, folder / "Ladder-1-step00000020-state") == second
    learned = json.loads((folder.parent / ".learned.json").read_text())  # for the next run of this kind
    assert "tiny-flux" in (key := states.learned_key(RunFolder(folder).spec)) and list(learned) == [key]
    assert learned[key]["step"]["n"] >= 30 and 0.01 < learned[key]["step"]["median"] < 1
    assert states.load_learned(folder, {"model": "another"}) == {}


CONFIG = config.load(environ={})


def test_a_lora_that_does_not_verify_is_never_called_completed(make_loop, tmp_path):
    loop = make_loop()
    lora, save_dir = loop.folder.folder / "toy.safetensors", tmp_path / "local"
    lora.write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert "damaged" in recovery.complete(loop)
    lora.unlink()
    assert "missing" in recovery.complete(loop)
    written(save_dir / lora.name, LORA)
    loop.state.save_dir = str(save_dir)
    for size in (None, len(LORA) - 1, len(LORA)):  # beside what was saved locally, what an earlier attempt left
        if size:
            lora.write_bytes(b"x" * size)
            os.utime(lora, (4e9, 4e9))  # by the clock of a network drive
        assert recovery.complete(loop) == "" and lora.read_bytes() == LORA
    assert make_loop("").folder.foreign and not recovery.complete(make_loop(""))
    assert not recovery.complete(make_loop("nodes = 2\n", machine=1)), "the first machine has it"


def test_a_start_that_the_system_refuses_is_tried_up_to_the_limit_with_growing_waits(make_loop, monkeypatch):
    clock, run = [100.0], make_loop()
    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    waits, limit_s = [], CONFIG.restart.start_s
    while (wait := recovery._try_again(run, "no descriptor", limit_s, 4)).state is State.BACKOFF:
        waits.append(wait.due_s - clock[0])
        clock[0] = wait.due_s
    assert waits[:8] == [1, 2, 4, 8, 16, 32, 60, 60] and limit_s <= clock[0] - 100 < limit_s + 60
    assert wait == Transition(State.FAILED, wait.message, code=4)
    assert wait.message.startswith(f"no descriptor (tried {len(waits) + 1} times in 1")
    assert recovery._try_again(run, "a full disk", limit_s + 1).due_s == clock[0] + 1, "another reason starts over"
    assert [event["message"] for event in events(run.folder.folder, "backoff")] == ["no descriptor", "a full disk"]


@pytest.mark.parametrize(
    ("wish", "trained_on", "found", "gpus", "state", "words"),
    [
        ("", "", 0, 1, None, ""),
        ("0", "a GPU", 0, 1, None, ""),
        ("1", "", None, 1, None, ""),  # the driver does not answer
        ("1", "", 1, 1, None, ""),
        ("", "A40", 0, 1, State.PREEMPTED, "the run has trained on A40, and this machine has none: nothing is trained"),
        ("1", "", 0, 1, State.FAILED, "the run needs 1 GPU, and this machine has none: nothing is trained on the CPU"),
        ("1", "", 1, 2, State.FAILED, "the run needs 2 GPUs, and this machine has 1 GPU: it needs 2 (or set"),
    ],
)
def test_a_run_that_needs_a_gpu_has_one(make_loop, monkeypatch, wish, trained_on, found, gpus, state, words):
    run = make_loop(f"gpus = {gpus}\n")
    monkeypatch.setenv(recovery.NEEDS_GPU, wish)
    monkeypatch.setattr(run.gpus, "count", lambda pause: found)
    run.state.gpu = trained_on
    result = recovery.gpu_missing(run)
    assert (result.state if result else None) is state
    if result is not None:
        assert words in result.message and result.code == (4 if state is State.FAILED else None)


def test_the_gpu_that_a_training_uses_is_recorded_once(make_loop):
    run = make_loop()
    recovery.note_gpu(run, [beat(about={"device": "cpu"}), beat(about={})])
    assert run.state.gpu == ""
    recovery.note_gpu(run, [beat(), beat(about={"device": "cuda:0"})])
    assert run.state.gpu and RunState.load(run.folder).gpu == run.state.gpu
    run.state.gpu = "RTX 4090"
    recovery.note_gpu(run, [beat(about={"device": "cuda:0"})])
    assert run.state.gpu == "RTX 4090"


def test_where_states_are_and_how_long_the_machine_stays(make_loop, tmp_path):
    run, second = make_loop(), make_loop("nodes = 2\n", machine=1)
    own = run.folder.folder
    assert run.leads and not run.several and second.several and not second.leads and make_loop("", machine=0).leads
    assert run.state_folders() == [own]
    for one in (run, second):
        one.state.save_dir = str(tmp_path / "local")
    assert run.state_folders() == [own], "it is not there"
    (tmp_path / "local").mkdir()
    assert run.state_folders() == [own, tmp_path / "local"] and second.state_folders() == [own]
    saved_state(tmp_path / "local", 90).rename(tmp_path / "local" / "toy-r8-step00000090-state")
    assert checkpoints.newest(run.state_folders()) is None, "another run, as of a sweep, has this save_dir too"
    mine = saved_state(tmp_path / "local", 20)
    assert checkpoints.newest(run.state_folders()) == mine
    assert run.remaining_s() == float("inf")
    run.state.shutdown = Shutdown("preempted", gone_by_s=time.monotonic() + 50)
    assert 40 < run.remaining_s() <= 50
    run.state.shutdown = Shutdown("preempted", gone_by_s=time.monotonic() - 50)
    assert run.remaining_s() == 0


def test_what_prevents_a_start_is_said_and_a_full_disk_may_pass(make_loop, monkeypatch, tmp_path):
    run = make_loop('name = "toy"\n')
    script(run)
    run.state.save_dir = str(tmp_path)
    own, other = (tmp_path / f".{name}-step00000020-state.7.tmp" for name in ("toy", "toy-r8"))
    own.mkdir()
    other.mkdir()
    wrong = lambda *_: (_ for _ in ()).throw(MonitorError("run.toml: no tier"))  # noqa: E731
    monkeypatch.setenv(next_attempt.CHECKED, f"start{next_attempt.UNCHECKED}")
    for problems, said in ((lambda *_: ["no model", "no tier"], "no model; no tier"), (wrong, "run.toml: no tier")):
        monkeypatch.setattr(next_attempt, "start_problems", problems)
        assert recovery.start_attempt(run) == Transition(State.FAILED, said)
    assert other.is_dir() and not own.exists(), "a run with the same `save_dir` may be writing a state"
    monkeypatch.setenv(next_attempt.CHECKED, "1")  # whoever started the monitor has looked
    monkeypatch.setattr(run.prewarm, "render", wrong)
    assert recovery.start_attempt(run).message == "attempt 1 cannot be started: run.toml: no tier"
    monkeypatch.setattr(checkpoints, "room_missing", lambda folders: "the disk is full")
    assert recovery.start_attempt(run) == Transition(State.FAILED, "the disk is full, then start the run again")
    run.state.attempt = 1
    assert recovery.start_attempt(run).state is State.BACKOFF and run.wait_limit_s == CONFIG.restart.disk_wait_s
    monkeypatch.setenv(recovery.NEEDS_GPU, "1")
    monkeypatch.setattr(run.gpus, "count", lambda pause: 0)
    assert "the run needs 1 GPU" in recovery.start_attempt(run).message


def test_a_tracker_that_cannot_be_started_costs_the_run_nothing(make_loop, monkeypatch):
    run, commands = make_loop('trackers = "trackio"\n'), []
    monkeypatch.setattr(recovery, "helper", lambda command, log: commands.append((command, log.name)))
    recovery.start_tracker(run.folder)
    folder = run.folder.folder
    assert commands == [([sys.executable, "-m", "monitor.trackio_feed", str(folder)], str(folder / "trackio.log"))]
    monkeypatch.setattr(recovery, "helper", lambda *_: (_ for _ in ()).throw(OSError(12, "Cannot allocate memory")))
    recovery.start_tracker(run.folder)
    assert "trackio could not be started: Cannot allocate memory" in (folder / "monitor.log").read_text()
    recovery.start_tracker(make_loop().folder)
    assert len(commands) == 1


def test_a_folder_that_its_drive_does_not_show_for_a_moment_is_not_called_gone(make_loop, monkeypatch):
    run = make_loop("")
    run.state.attempt = 1
    monkeypatch.setattr(recovery, "gpu_missing", lambda run: Transition(State.QUEUED, "so far"))
    assert "is gone" in recovery.start_attempt(run).message
    monkeypatch.setattr(os, "lstat", lambda *_, **__: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
    assert recovery.start_attempt(run).message == "so far"


@pytest.mark.slow
def test_a_run_whose_folder_is_moved_stops_with_that_reason_and_leaves_nothing_at_the_old_place(folder):
    toy_run(folder, fault_at(15, "while (run / 'train.sh').exists(): time.sleep(0.01)\nsys.exit(1)"), every=10)
    process = monitor(folder)
    wait_for(lambda: step_of(folder) == 15)
    moved = folder.rename(folder.with_name("moved"))
    code, _, err = finish(process)
    assert code == 1 and f"{folder / 'train.sh'} is gone: the run's folder was moved or deleted. Move it back" in err
    assert not folder.exists() and checkpoints.newest([moved])


STEPS = 60
LIMITS = "[watch]\nstopped_s = 1\n[end]\ngrace_s = 1\n[phases.step]\nfloor_s = 60\n"


@pytest.fixture
def run(tmp_path):
    return together(tmp_path / "toy", steps=STEPS)


@pytest.fixture
def loops(run):
    """Two machines, started. Each is the shell's loop that starts a machine's part again, in place of Slurm's job."""
    started, limits = [], str(limits_file(run, LIMITS))
    for number in (0, 1):
        env = environment(run, HANGPROOF_NODE=str(number), HANGPROOF_LIMITS=limits)
        with open(run / f"console-{number}.txt", "ab") as log:
            command = ["bash", "-c", AGAIN, sys.executable, str(run)]
            started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log))
    yield started
    for loop in started:
        if loop.poll() is None:  # the test has failed
            for process in [*psutil.Process(loop.pid).children(recursive=True), loop]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            loop.wait()


def console(folder):
    return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(folder.rglob("console-*.txt")))


def test_a_stopped_rank_is_named_by_its_machine_and_all_start_again_from_the_last_state(run, loops):
    second = run / "machines" / "1"
    (rank,) = wait_for(lambda: status(run)["step"] >= 35 and status(second)["trainer_pids"], 60, "step 35")
    os.kill(rank, signal.SIGSTOP)
    assert [loop.wait(120) for loop in loops] == [0, 0], console(run)
    now = status(run)
    assert now["state"] == "completed" and now["attempt"] > 1 and weight(run) == undisturbed(STEPS), console(run)
    (other,) = now["machines"]
    assert other["machine"] == "1" and other["host"] and other["step"] >= 35, now  # as last read: it may end later
    assert status(second)["step"] == STEPS
    found, *_ = incidents(second)
    assert (found["kind"], found["cause"], found["evidence"]["rank"]) == ("hang", "trainer_stopped", 1), found
    own, *_ = incidents(run)
    assert (own["kind"], own["evidence"]["rank"]) == ("crash", 0), "the first machine has its own side of it"
    assert own["resumed_from"] >= 30
