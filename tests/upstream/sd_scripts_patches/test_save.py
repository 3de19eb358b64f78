"""Saves of the real FLUX trainer are complete whenever it is killed; weights that must not be saved are refused."""

import signal

import resume_helpers as helpers

from guards import checkpoint

SAVES = ["--save_state", "--save_every_n_steps", "2", "--save_last_n_steps_state", "2", "--max_train_steps", "10"]

KILLED_IN_A_FILE = """
import os, signal
write = module.save
def half(value, path, *args, **kwargs):
    if "step00000006-state" not in str(path) or "optimizer" not in str(path):
        return write(value, path, *args, **kwargs)
    with open(path, "wb") as file:
        file.write(b"half of what it was to be")
    os.kill(os.getpid(), signal.SIGKILL)
module.save = half
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


def test_a_kill_during_a_save_leaves_only_complete_files_and_the_resumed_run_removes_the_rest(each_work, tmp_path):
    """Killed while it writes the optimizer into the state of step 6. Each second step is saved, two states are kept."""
    faults = fault(tmp_path, "accelerate.checkpointing", KILLED_IN_A_FILE)
    helpers.train(each_work, tmp_path, *SAVES, faults=faults, code=-signal.SIGKILL)
    made = tmp_path / "made"
    newest, older = checkpoint.states(made)
    assert (newest.name, older.name) == ("tiny-step00000004-state", "tiny-step00000002-state")
    assert checkpoint.problems(newest, deep=True) == checkpoint.problems(older, deep=True) == []
    (left,) = made.glob(".*")
    assert [path for path in left.rglob("*") if path.is_file() and path.read_bytes().startswith(b"half of")]
    result = helpers.train(each_work, tmp_path, *SAVES, "--resume", str(newest))
    states = [path.name for path in checkpoint.states(made)]
    assert sorted(states) == ["tiny-state", "tiny-step00000008-state", "tiny-step00000010-state"]
    assert f"/made/{left.name}, which a killed process left" in result.log and not list(made.glob(".*"))


def test_weights_with_nan_are_refused_and_the_run_ends(each_work, tmp_path):
    args = ("--save_state", "--save_every_n_epochs", "1", "--max_train_epochs", "3")
    faults = fault(tmp_path, "networks.lora_flux", NAN_AT_EPOCH_TWO)
    result = helpers.train(each_work, tmp_path / "out", *args, faults=faults, code=1)
    assert "hold NaN or infinity" in result.log, result.log[-2000:]
    assert "tiny-000002.safetensors is not saved" in result.log
    assert helpers.names(tmp_path / "out") == ["tiny-000001-state", "tiny-000001.safetensors"]
    assert checkpoint.problems(tmp_path / "out/made/tiny-000001-state", deep=True) == []
