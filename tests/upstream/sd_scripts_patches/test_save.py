"""Saves of the real FLUX trainer are complete whenever it is killed; weights that must not be saved are refused."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import resume_helpers as helpers

from guards import checkpoint, file_contents

SAVES = ["--save_state", "--save_every_n_steps", "2", "--save_last_n_steps_state", "2", "--max_train_steps", "10"]

KILLED_IN_A_FILE = """
import os, signal
write = module.NAME
def half(value, path, *args, **kwargs):
    if not all(part in str(path) for part in PARTS):
        return write(value, path, *args, **kwargs)
    with open(path, "wb") as file:
        file.write(b"half of what it was to be")
    os.kill(os.getpid(), signal.SIGKILL)
module.NAME = half
"""

NAN_AT_EPOCH_TWO = """
epochs, begin = [0], module.LoRANetwork.on_epoch_start
def on_epoch_start(self, *args):
    begin(self, *args)
    epochs[0] += 1
    if epochs[0] == 2:
        next(iter(self.parameters())).data.view(-1)[0] = float("nan")
module.LoRANetwork.on_epoch_start = on_epoch_start
"""


def fault(folder, module, source):
    path = folder / "fault.py"
    path.write_text(source)
    return f"{module}={path}"


@pytest.fixture(scope="module")
def killed(each_work, tmp_path_factory):
    """Two runs that save each second step and keep two states. One is killed while it writes the optimizer into the
    state of step 6, the other while it writes the LoRA of step 6."""
    base = tmp_path_factory.mktemp("killed")

    def run(name, module, function, *parts):
        out = base / name
        out.mkdir()
        faults = fault(out, module, KILLED_IN_A_FILE.replace("NAME", function).replace("PARTS", repr(parts)))
        helpers.train(each_work, out, *SAVES, faults=faults, code=-signal.SIGKILL)
        return out

    with ThreadPoolExecutor(2) as pool:
        state = pool.submit(run, "state", "accelerate.checkpointing", "save", "step00000006-state", "optimizer")
        lora = pool.submit(run, "lora", "safetensors.torch", "save_file", "step00000006.", ".safetensors")
        return {"state": state.result(), "lora": lora.result()}


@pytest.mark.parametrize("what", ["state", "lora"])
def test_a_kill_during_a_save_leaves_only_complete_files(killed, what):
    made = killed[what] / "made"
    assert [path.name for path in checkpoint.states(made)] == ["tiny-step00000004-state", "tiny-step00000002-state"]
    assert all(checkpoint.problems(path, deep=True) == [] for path in checkpoint.states(made))
    loras = ["tiny-step00000002.safetensors", "tiny-step00000004.safetensors"]
    loras += ["tiny-step00000006.safetensors"] if what == "state" else []
    assert sorted(path.name for path in made.glob("[!.]*.safetensors")) == loras
    assert not any(file_contents.damage(made / name) for name in loras)
    halves = [path for path in made.rglob("*") if path.is_file() and path.read_bytes().startswith(b"half of")]
    assert len(halves) == 1  # the kill did come in the middle
    assert any(part.startswith(".") and ".tmp" in part for part in halves[0].relative_to(made).parts)


def test_the_resumed_run_deletes_old_states_after_new_ones_and_what_the_killed_one_left(each_work, killed):
    out = killed["state"]
    newest = checkpoint.newest_valid(out / "made")
    (left,) = (out / "made").glob(".*")
    result = helpers.train(each_work, out, *SAVES, "--resume", str(newest))
    states = [path.name for path in checkpoint.states(out / "made")]
    assert sorted(states) == ["tiny-state", "tiny-step00000008-state", "tiny-step00000010-state"]
    assert f"/made/{left.name}, which a killed process left" in result.log
    assert not list((out / "made").glob(".*"))


def test_weights_with_nan_are_refused_and_the_run_ends(each_work, tmp_path):
    args = ("--save_state", "--save_every_n_epochs", "1", "--max_train_epochs", "3")
    faults = fault(tmp_path, "networks.lora_flux", NAN_AT_EPOCH_TWO)
    result = helpers.train(each_work, tmp_path / "out", *args, faults=faults, code=1)
    assert "hold NaN or infinity" in result.log, result.log[-2000:]
    assert "tiny-000002.safetensors is not saved" in result.log
    assert helpers.names(tmp_path / "out") == ["tiny-000001-state", "tiny-000001.safetensors"]
    assert checkpoint.problems(tmp_path / "out/made/tiny-000001-state", deep=True) == []
