"""What the machine costs and has: a spend limit stops a run with a checkpoint; a machine without its GPU trains nothing."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from monitor_helpers import events, finish, limits_file, monitor, supervise, toy_run, wait_for
from run_facts import status, weight
from toys import HOLD, undisturbed

from guards import checkpoint
from monitor.state import EXIT_BUDGET, EXIT_DONE, EXIT_PREEMPTED
from runs.paths import ROOT

LIMITS = "[end]\nstop_save_s = 20\n"


@pytest.fixture
def cheap(tmp_path, monkeypatch):
    """A toy run of 3 s at 0.1 a second: it has a price, and its script stays its own, because it has no real spec."""
    folder = toy_run(tmp_path / "toy", steps=60, pace=0.05, every=20)
    (tmp_path / "sitecustomize.py").write_text(
        "import monitor.run_folder as r\n"
        "init = r.RunFolder.__init__\n"
        "def patched(self, *given, **named):\n"
        "    init(self, *given, **named)\n"
        '    self.spec = {"price_per_hour": 360.0, "spend_limit": 0.15}\n'
        "r.RunFolder.__init__ = patched\n"
        "r.RunFolder.foreign = property(lambda self: True)\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    return folder, {"PYTHONPATH": paths, "HANGPROOF_LIMITS": str(limits_file(folder, LIMITS))}


@pytest.mark.slow
def test_a_run_that_reaches_its_spend_limit_stops_with_a_checkpoint_and_goes_on_when_it_is_raised(cheap, tmp_path):
    folder, env = cheap
    code, _, err = supervise(folder, **env)
    assert code == EXIT_BUDGET, err
    now = status(folder)
    assert now["state"] == "failed" and "the spend limit of 0.15 is reached" in now["reason"]
    assert "Raise spend_limit" in now["reason"] and f"Stopped at step {now['step']}" in now["reason"]
    saved = next(iter(checkpoint.states(folder)))
    assert checkpoint.guard_of(saved)["step"] == now["step"] > 0, "it was saved where it stopped"
    assert events(folder, "stopping")[0]["message"].startswith("the spend limit is reached")

    code, _, err = supervise(folder, **env)  # it may not go on: the time of the first start counts
    assert code == EXIT_BUDGET and len(events(folder, "started")) == 1, err

    text = (tmp_path / "sitecustomize.py").read_text()
    (tmp_path / "sitecustomize.py").write_text(text.replace("0.15", "50.0"))
    code, _, err = supervise(folder, **env)
    assert code == EXIT_DONE and weight(folder) == undisturbed(), err


# It trains on a GPU, and its first attempt waits for a request to stop.
GPU_TOY = "hb.describe('cuda:0', 'nccl')\n" + HOLD


@pytest.fixture
def rented(tmp_path):
    """A toy run on a machine with a fake GPU; the file `absent` takes the GPU away."""
    folder = toy_run(tmp_path / "toy", GPU_TOY, steps=40, pace=0.03, every=10)
    (tmp_path / "fake").mkdir()
    shutil.copy(ROOT / "tests/support/shims/nvml/pynvml.py", tmp_path / "fake" / "pynvml.py")
    env = {"PYTHONPATH": str(tmp_path / "fake"), "HANGPROOF_GPUS": "0"}
    return folder, tmp_path / "fake" / "absent", env | {"HANGPROOF_LIMITS": str(limits_file(folder, LIMITS))}


@pytest.mark.slow
def test_a_machine_that_comes_back_without_its_gpu_trains_nothing_and_the_run_can_go_on(rented):
    folder, absent, env = rented
    first = monitor(folder, **env)
    wait_for(lambda: status(folder)["step"] == 15)
    first.terminate()
    assert finish(first)[0] == EXIT_PREEMPTED
    assert json.loads((folder / "monitor.json").read_text())["gpu"]

    absent.touch()
    code, _, err = supervise(folder, **env)
    assert code == EXIT_PREEMPTED and status(folder)["state"] == "preempted", err
    assert (
        "has trained on" in err and "this machine has none: nothing is trained on the CPU" in status(folder)["reason"]
    )
    assert len(events(folder, "started")) == 1, "no attempt was started"

    absent.unlink()
    code, _, err = supervise(folder, **env)
    assert code == EXIT_DONE and weight(folder) == undisturbed(40), err
