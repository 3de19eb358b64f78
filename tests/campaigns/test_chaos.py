"""Chaos on the monitor (`python -m benchmarks chaos`: 25 minutes, every place, 50 kills): proof that it finds a defect.

python -m pytest tests/campaigns/test_chaos.py          1 minute
"""

import errno
import sys

import pytest

from benchmarks import chaos
from benchmarks.chaos import Fault, Outcome, Trial
from benchmarks.chaos_seen import Seen

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="chaos needs /proc, so Linux")

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
    good = dict(state="completed", message="60 steps", exit_code=0, started=True, reached=True, lora="right")
    return Outcome(Trial("t", "hang"), **good | changed)


@pytest.mark.parametrize(
    ("changed", "violation"),
    [
        ({}, None),
        ({"state": "failed", "exit_code": 1, "lora": "none", "message": "the disk is full"}, None),
        ({"lora": "none"}, "completed, and the LoRA is none"),
        ({"trainers_at_once": 2}, "2 trainers at once"),
        ({"unwatched_s": 10.4}, "the training was unwatched for 10.4 s"),
        ({"timed_out": True, "state": "running"}, "not over after"),
        ({"trainers_left": 1}, "left a living trainer"),
        ({"state": "failed", "exit_code": 1, "message": ""}, "failed without a reason"),
        ({"exit_code": 1}, "completed with exit code 1"),
        ({"state": "running", "exit_code": 1}, "ended with exit code 1 in state 'running'"),
        ({"state": "", "started": False, "exit_code": 1, "output": "monitor: no space"}, None),
        ({"state": "", "started": False, "exit_code": 0, "output": "monitor: no space"}, "no reason"),
    ],
)
def test_a_broken_promise_is_a_violation(changed, violation):
    found = chaos.judge(outcome(**changed))
    assert bool(found) == (violation is not None), found
    assert violation is None or any(violation in text for text in found)


def test_a_training_without_a_sign_of_its_monitor_is_unwatched(tmp_path):
    seen = Seen(tmp_path)
    (tmp_path / "monitor.lock").touch()
    locks = {(tmp_path / "monitor.lock").stat().st_ino}
    for second in range(5):
        (tmp_path / "status.json").write_text(str(second))
        seen.note(1, locks, float(second))
    assert seen.unwatched_s == 0.0
    seen.note(1, locks, 9.0)  # status.json is old
    assert seen.unwatched_s == 5.0
    (tmp_path / "status.json").write_text("written by a process without the lock")
    seen.note(1, set(), 15.0)
    assert seen.unwatched_s == 11.0
    seen.note(0, locks, 60.0)
    assert seen.unwatched_s == 11.0, "without a training there is nothing to watch"


@pytest.fixture(scope="module")
def discovered():
    """The places that two runs under a healthy monitor reach, and the outcomes of these runs."""
    places, outcomes = chaos.places()
    assert {name: o.state for name, o in outcomes.items()} == {
        name: journey.ends for name, journey in chaos.JOURNEYS.items()
    }
    assert [v for o in outcomes.values() for v in o.violations] == []
    functions = {function for function, _, _ in places}
    assert {"os.replace", "os.fsync", "process.fork_exec", "os.waitpid", "time.monotonic", "fcntl.flock"} <= functions
    return places, outcomes


@pytest.mark.timeout(400)
def test_a_monitor_that_dies_of_an_error_is_found(tmp_path, discovered):
    shim = tmp_path / "fragile"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(FRAGILE, encoding="utf-8")
    replaced = [p for p, calls in discovered[0].items() if p[0] == "os.replace" and calls["started"] > 4]
    assert replaced, "status.json is replaced all the time"
    trial = Trial("fragile", "hang", Fault(replaced[0], errno.EIO, 0.0))
    broken = chaos.play(trial, keep=tmp_path / "kept", shim=shim)
    assert broken.reached
    assert any("unwatched" in v or "ended with exit code" in v for v in broken.violations), broken
    assert (tmp_path / "kept").is_dir() and broken.folder
