"""What may be saved, how it replaces what was there, and which old state may go: without a training."""

import argparse
import shutil

import pytest
import torch
from safetensors.torch import save_file

from guards import checkpoint
from sd_scripts_patches import save
from sd_scripts_patches.patch import with_names


def test_a_finite_network_passes_and_the_bad_tensor_is_named():
    good = {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.bfloat16)}
    save.refuse_nan(good, "x")
    save.refuse_nan({}, "x")
    with pytest.raises(save.NotSaved, match=r"x is not saved: 1 of 3 trained tensors .*\(the first is c\)"):
        save.refuse_nan({**good, "c": torch.tensor([1.0, float("inf")])}, "x")


def test_a_lora_is_replaced_atomically(tmp_path):
    network, path = torch.nn.Linear(2, 2), tmp_path / "x.safetensors"

    def write(file, dtype, metadata):
        assert file.endswith(".safetensors") and file != str(path)
        with open(file, "w") as handle:
            handle.write(text)
            if text == "worse":
                raise OSError("no space left on device")

    network.save_weights, text = write, "good"
    save.save_weights(network, str(path), None, {})
    text = "worse"
    with pytest.raises(OSError, match="no space"):
        save.save_weights(network, str(path), None, {})
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"] and path.read_text() == "good"


def test_a_folder_that_cannot_be_deleted_does_not_end_the_run_and_the_last_good_state_stays(tmp_path, capsys):
    """sd-scripts counts it as old. The state after it was damaged on the disk since it was written."""
    old = tmp_path / "tiny-step00000001-state"
    old.mkdir()
    replaced = with_names(rmtree=save.rmtree)(shutil)
    replaced.rmtree(str(old))
    assert not list(tmp_path.iterdir()) and replaced.copyfile is shutil.copyfile
    old.touch()
    save.rmtree(str(old / "x-state"))  # its parent is a file: no deletion is possible
    assert "was not deleted" in capsys.readouterr().err
    for step in (2, 4):
        with checkpoint.writing(tmp_path / f"tiny-step{step:08d}-state", step=step, epoch=1) as folder:
            (folder / "optimizer.bin").write_bytes(b"x" * 100)
    (tmp_path / "tiny-step00000004-state" / "optimizer.bin").write_bytes(b"y" * 100)
    save.rmtree(str(tmp_path / "tiny-step00000002-state"))
    assert checkpoint.newest_valid(tmp_path).name == "tiny-step00000002-state"
    assert "is kept: no other state verifies" in capsys.readouterr().err


def test_a_resumed_run_deletes_what_a_killed_one_had_still_to_delete_and_nothing_else(tmp_path):
    """Killed after state 10 and the one of epoch 4. Step 12 and epoch 5 are not saved."""
    for name in ("-step00000004", "-step00000006", "-step00000007", "-step00000010", "-000001", "-000003", "-000004"):
        with checkpoint.writing(tmp_path / f"x{name}-state", step=int(name[-2:]), epoch=1) as folder:
            (folder / "optimizer.bin").write_bytes(b"x")
        with checkpoint.writing_file(tmp_path / f"x{name}.safetensors") as file:
            save_file({"lora_up.weight": torch.ones(2, 2)}, file)
    before = {path.name for path in tmp_path.iterdir()}
    args = argparse.Namespace(output_dir=tmp_path, output_name="x", save_every_n_steps=2, save_every_n_epochs=1)
    vars(args).update(save_last_n_steps=4, save_last_n_steps_state=2, save_last_n_epochs=3, save_last_n_epochs_state=1)
    save.finish_deletions(args, 12, 5)
    assert before == {path.name for path in tmp_path.iterdir()}
    save.finish_deletions(args, 11, 4)
    gone = {"x-step00000006-state", "x-step00000004.safetensors", "x-000003-state", "x-000001.safetensors"}
    assert before - {path.name for path in tmp_path.iterdir()} == gone
    args.save_every_n_steps = args.save_every_n_epochs = None
    save.finish_deletions(args, 11, 4)
    assert before - {path.name for path in tmp_path.iterdir()} == gone
