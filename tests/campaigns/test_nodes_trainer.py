"""The built-in trainer on two machines without a shared disk, over gloo: the same LoRA as one process, whatever fails.

python -m pytest tests/campaigns/test_nodes_trainer.py          10 minutes
"""

import os
import shutil
import subprocess
import sys

import netns
import numpy as np
import pytest
from monitor_helpers import ROOT, incidents, status, wait_for
from nodes_helpers import Group
from runs_helpers import pictures
from safetensors.numpy import load_file

import runs
from trainer import tiny_flux

pytestmark = pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())
STEPS = 60
REAL = "[restart]\nbackoff_first_s = 1\n"  # the limits as users have them


class Trained(Group):
    """A run of the built-in trainer, with one process on each of two machines."""

    def folder(self, node):
        return self.root / f"m{node}" / "outputs" / "pair"

    def env(self, node, **more):
        found = super().env(node, **more)
        return {k: v for k, v in found.items() if k != "HANGPROOF_NODES"} | {
            "HANGPROOF_DATA": str(self.root / f"m{node}")
        }


def create(root, monkeypatch, model, **fields):
    """Make the run under this data root."""
    monkeypatch.setenv("HANGPROOF_DATA", str(root))
    shutil.copytree(model, root / "models" / "tiny-flux")
    settings = {
        "resolution": 64,
        "repeats": 10,
        "max_train_steps": STEPS,
        "save_every_n_steps": 10,
        "rank": 4,
        "workers": 0,
    }
    settings |= {"save_every_n_epochs": 0, "sample_every_n_steps": 0, "mixed_precision": "no", "trigger": "ohwx"}
    spec = runs.make({"name": "pair", "model": "tiny-flux", "backend": "diffusers", **settings, **fields})
    return runs.create(spec, pictures(root / "pictures", 6))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_flux.ensure(tmp_path_factory.mktemp("model") / "tiny-flux")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, model):
    """The LoRA of one process that accumulates the gradients of two batches."""
    root = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        folder = create(root, patch, model, gradient_accumulation=2)
        env = {k: v for k, v in os.environ.items() if not k.startswith("HANGPROOF_") or k == "HANGPROOF_DATA"}
        env |= {"HANGPROOF_GPUS": "", "TMPDIR": str(root)}
        command = [sys.executable, "-m", "monitor", "run", str(folder)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(folder / "pair.safetensors")


def difference(lora, other) -> float:
    """The largest difference of two LoRAs."""
    assert lora.keys() == other.keys()
    return max(float(np.abs(lora[key].astype("f8") - other[key].astype("f8")).max()) for key in lora)


def two(root, monkeypatch, model, machines, limits, **env):
    group = Trained(root, machines, limits=limits)
    create(root / "m0", monkeypatch, model, nodes=2, gpus=1)
    shutil.copytree(model, root / "m1" / "models" / "tiny-flux")
    group.start(**env)
    return group


def test_an_undisturbed_run_on_two_machines_gives_the_lora_of_one_with_twice_the_accumulation(
    tmp_path, monkeypatch, model, alone
):
    with netns.machines(2, (0, 7777)) as machines:
        group = two(tmp_path, monkeypatch, model, machines, REAL)
        assert group.finish(400) == [0, 0], group.console()
        assert group.living() == {}
    assert status(group.run)["restarts"] == 0
    assert difference(load_file(group.run / "pair.safetensors"), alone) < 1e-5
    assert not (group.folder(1) / "pair.safetensors").exists(), "rank 0 alone writes"


def test_killed_monitors_a_killed_rank_and_a_link_that_is_cut_for_60_s_leave_the_lora_as_it_was(
    tmp_path, monkeypatch, model, alone
):
    with netns.machines(2, (0, 7777)) as machines:
        group = two(tmp_path, monkeypatch, model, machines, REAL)
        group.wait_step(5, 300)
        ranks = machines[0].find("-m trainer") + machines[1].find("-m trainer")
        group.kill(group.monitors(1))
        group.kill(group.monitors(0))
        group.wait_step(12, 300)
        assert machines[0].find("-m trainer") + machines[1].find("-m trainer") == ranks, "both are adopted"
        group.kill(machines[1].find("-m trainer")[-1:])
        wait_for(lambda: status(group.run)["attempt"] == 2 and group.step() >= 22, 300, "the group goes on")
        machines[1].link(False)
        began = wait_for(lambda: status(group.run)["elapsed_s"], 10)
        for machine in machines:
            wait_for(lambda machine=machine: not machine.find("-m trainer"), 60, "both end their ranks")
        wait_for(lambda: status(group.run)["elapsed_s"] >= began + 60, 90)
        machines[1].link(True)
        assert group.finish(400) == [0, 0], group.console()
        assert group.living() == {}
    found = [incident["cause"] for incident in incidents(group.run)]
    assert found == ["killed", "node_lost"], f"{found}\n{group.console()}"
    assert status(group.run)["restarts"] == 2 and group.attempts() == [1, 2, 3]
    assert difference(load_file(group.run / "pair.safetensors"), alone) < 1e-5
