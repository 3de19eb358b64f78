"""Chaos on the monitor (`python -m benchmarks chaos`: 25 minutes, every place, 50 kills): proof that it finds a defect.

python -m pytest tests/campaigns/test_chaos.py          1 minute
"""

import errno
import sys

import pytest

from benchmarks import chaos

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="chaos needs /proc, so Linux")

# A monitor that dies of any error of the operating system, with its keeper. The wrapper's error becomes that death.
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
    return chaos.Outcome(chaos.Trial("t", "hang"), **good | changed)


@pytest.mark.parametrize(
    ("changed", "violation"),
    [
        ({}, None),
        ({"state": "failed", "exit_code": 1, "lora": "none", "message": "the disk is full"}, None),
        ({"lora": "none"}, "completed, and the LoRA is none"),
        ({"trainers_at_once": 2}, "2 trainers at once"),
        ({"unwatched_s": 10.4}, "the training was unwatched for 10.4 s"),
        ({"exit_code": None, "state": "running"}, "not over after"),
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


@pytest.mark.timeout(400)
def test_a_monitor_that_dies_of_an_error_is_found(tmp_path):
    journeys = chaos.undisturbed()
    assert {name: o.state for name, o in journeys.items()} == {name: j.ends for name, j in chaos.JOURNEYS.items()}
    assert [v for o in journeys.values() for v in o.violations] == []
    places = journeys["hang"].places
    functions = {function for function, _, _ in places}
    assert {"os.replace", "os.fsync", "process.fork_exec", "os.waitpid", "file.write"} <= functions
    shim = tmp_path / "fragile"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(FRAGILE, encoding="utf-8")
    replaced = [place for place, calls in places.items() if place[0] == "os.replace" and calls[1] > 4]
    assert replaced, "status.json is replaced all the time"
    broken = chaos.play(chaos.Trial("fragile", "hang", replaced[0], errno.EIO), keep=tmp_path / "kept", shim=shim)
    assert broken.reached
    assert any("unwatched" in v or "ended with exit code" in v for v in broken.violations), broken
    assert list((tmp_path / "kept").iterdir())
