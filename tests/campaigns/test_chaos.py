"""Chaos on the monitor: a short form of `python -m benchmarks chaos`, and proof that the benchmark finds a defect.

The complete form (every place, 50 kills) takes about 25 minutes on two free cores: `python -m benchmarks chaos`.
"""

import errno
import json
import os
import subprocess
import sys
import time

import pytest
from monitor_helpers import wait_for

from benchmarks import chaos, chaos_run
from benchmarks.chaos_run import Fault, Outcome, Trial
from benchmarks.chaos_sampler import SAMPLE_S, Sampler, Seen
from guards import gate
from runs.paths import ROOT

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="chaos needs /proc, so Linux")

PLACE = ("os.open", "monitor/run_folder.py", 1)
# A monitor that dies of any error of the operating system, and its keeper with it. The wrapper's error becomes that death.
FRAGILE = """
import os
source = open(os.environ["CHAOS_SHIM"] + "/sitecustomize.py").read()
dies = "os.kill(os.getppid(), 9) if '--child' in sys.orig_argv else None; os._exit(1)"
assert "raise error" in source
exec(compile(source.replace("raise error", dies), "chaos", "exec"))
"""


def outcome(**changed):
    """A trial that ended as it must, except for what is changed."""
    good = {
        "state": "completed",
        "message": "60 steps",
        "exit_code": 0,
        "started": True,
        "reached": True,
        "lora": "right",
    }
    return Outcome(Trial("t", "hang"), **good | changed)


@pytest.mark.parametrize(
    ("changed", "violation"),
    [
        ({}, None),
        ({"state": "failed", "exit_code": 1, "lora": "none", "message": "the disk is full"}, None),
        ({"state": "stopped", "exit_code": 3, "lora": "none"}, None),
        ({"lora": "none"}, "completed, and the LoRA is none"),
        ({"lora": "wrong"}, "completed, and the LoRA is wrong"),
        ({"trainers_at_once": 2}, "2 trainers at once"),
        ({"unwatched_s": 10.4}, "the training was unwatched for 10.4 s"),
        ({"timed_out": True, "state": "running"}, "not over after"),
        ({"trainers_left": 1}, "left a living trainer"),
        ({"state": "failed", "exit_code": 1, "message": ""}, "failed without a reason"),
        ({"exit_code": 1}, "completed with exit code 1"),
        ({"state": "running", "exit_code": 1}, "ended with exit code 1 in state 'running'"),
        ({"state": "", "started": False, "exit_code": 1, "output": "monitor: no space"}, None),
        ({"state": "", "started": False, "exit_code": 1, "output": "Traceback (most…"}, "no reason"),
        ({"state": "", "started": False, "exit_code": 0, "output": "monitor: no space"}, "no reason"),
    ],
)
def test_a_broken_promise_is_a_violation(changed, violation):
    found = chaos_run.judge(outcome(**changed))
    assert bool(found) == (violation is not None), found
    assert violation is None or any(violation in text for text in found)


def test_a_training_without_a_sign_of_its_monitor_is_unwatched(tmp_path):
    seen = Seen(tmp_path)
    own = {os.getpid(): "1"}
    (tmp_path / "monitor.lock").touch()
    locks = {(tmp_path / "monitor.lock").stat().st_ino}
    for second in range(5):
        (tmp_path / "status.json").write_text(str(second))
        seen.note(own, locks, float(second))
    assert seen.unwatched_s == 0.0
    seen.note(own, locks, 9.0)  # status.json is old
    assert seen.unwatched_s == 5.0
    (tmp_path / "status.json").write_text("written by a process without the lock")
    seen.note(own, set(), 15.0)
    assert seen.unwatched_s == 11.0
    seen.note({}, locks, 60.0)
    assert seen.unwatched_s == 11.0, "without a training there is nothing to watch"


def test_a_process_that_waits_at_the_gate_is_no_trainer_until_it_has_passed(tmp_path):
    loop = tmp_path / "toy_loop.py"
    loop.write_text("import time\ntime.sleep(60)\n")
    own = {"TOY_RUN": tmp_path.name, gate.FOLDER: str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, str(loop)], env={**os.environ, **own, **more})
        for more in ({}, {gate.VARIABLE: "7"})
    ]
    try:
        with Sampler() as sampler:
            seen = sampler.add(tmp_path.name, tmp_path)
            wait_for(lambda: seen.trainers() == [processes[0].pid], what="the first trainer")
            time.sleep(10 * SAMPLE_S)
            assert seen.at_once == 1
            (tmp_path / gate.PASSED).touch()
            wait_for(lambda: seen.at_once == 2, what="the second trainer")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_each_place_gets_its_trials_and_the_errors_take_turns():
    found = {("os.open", "monitor/a.py", n): {"journey": "hang", "start": 0, "started": 8} for n in range(10)}
    found |= {("os.stat", "monitor/b.py", 1): {"journey": "hang", "start": 4, "started": 0}}
    made = chaos.trials(found, seed=3)
    assert len(made) == 10 * 3 + 2
    assert {t.fault.errno for t in made} == set(chaos.ERRORS)
    assert all(t.fault.from_start == (t.fault.place[0] == "os.stat") for t in made)
    later = [t.fault.call for t in made if t.fault.call > 1]
    assert len(later) == 10 and all(2 <= call <= 4 for call in later)
    assert made == chaos.trials(found, seed=3) != chaos.trials(found, seed=4)
    assert len(chaos.trials(found, seed=3, all_errors=True)) == 5 * len(made)


def test_a_violation_names_the_place_the_error_and_the_folder():
    fault = Fault(PLACE, errno.EIO, 5.0)
    broken = Outcome(Trial("t", "hang", fault), state="running", exit_code=1, output="OSError: x\n", folder="/kept")
    broken.violations = chaos_run.judge(broken)
    text = chaos.describe(broken)
    assert text.startswith("VIOLATION os.open at monitor/run_folder.py:1: EIO for 5 s from call 1 (hang journey)")
    assert "kept: /kept" in text and "OSError: x" in text
    assert json.dumps(chaos.record(broken))


@pytest.fixture(scope="module")
def discovered():
    """The places that two runs under a healthy monitor reach, and the outcomes of these runs."""
    with Sampler() as sampler:
        places, outcomes = chaos.places(sampler, ROOT)
    assert {name: o.state for name, o in outcomes.items()} == chaos.ENDS
    assert [v for o in outcomes.values() for v in o.violations] == []
    return places, outcomes


@pytest.fixture
def found(discovered):
    """The places."""
    return discovered[0]


def test_the_wrapper_finds_every_kind_of_call(found):
    """Files, processes, signals, clocks, locks: found by walking the modules, not by a list of names."""
    functions = {function for function, _, _ in found}
    for function in ("open", "file.readall", "os.replace", "os.fsync", "os.scandir.next", "os.statvfs"):
        assert function in functions, f"files: {function}"
    for function in ("process.fork_exec", "os.waitpid", "signal.pidfd_send_signal", "signal.signal"):
        assert function in functions, f"processes and signals: {function}"
    for function in ("time.monotonic", "time.clock_gettime", "fcntl.flock", "select.select"):
        assert function in functions, f"clocks and locks: {function}"
    assert len(found) > 150
    assert {file.partition("/")[0] for _, file, _ in found} == {"monitor", "guards"}


@pytest.mark.timeout(400)
def test_no_run_is_lost_in_a_short_campaign(tmp_path, discovered):
    result = chaos.run(seed=7, short=9, number_of_kills=3, keep=tmp_path / "kept", discovered=discovered)
    assert result["violations"] == [] and result["undisturbed"] == [], json.dumps(result, indent=1)
    assert result["not_run"] == 0 and result["trials"] == 9 and result["kills"] >= 2
    assert result["not_reached"] <= 2, "a call at random may not come again"
    assert result["longest_sample_s"] < 5.0


@pytest.mark.timeout(400)
def test_a_monitor_that_dies_of_an_error_is_found(tmp_path, found):
    shim = tmp_path / "fragile"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(FRAGILE, encoding="utf-8")
    replaced = [p for p, calls in found.items() if p[0] == "os.replace" and calls["started"] > 4]
    assert replaced, "status.json is replaced all the time"
    trial = Trial("fragile", "hang", Fault(replaced[0], errno.EIO, 0.0))
    with Sampler() as sampler:
        broken = chaos_run.play(trial, sampler, keep=tmp_path / "kept", shim=shim)
    assert broken.reached
    assert any("unwatched" in v or "ended with exit code" in v for v in broken.violations), broken
    assert (tmp_path / "kept").is_dir() and broken.folder


def test_the_command_line_lists_the_benchmark():
    command = [sys.executable, "-m", "benchmarks", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "chaos" in done.stdout
