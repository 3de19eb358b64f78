"""An error of the operating system ends the trainer with the file and what to do."""

from trainer_helpers import flags, fork


def test_a_disk_without_space_is_an_error_with_the_file_and_leaves_valid_states(work, tmp_path):
    """A limit on the size of files stands in for a full disk: the weights are below it, the optimizer state is not."""
    saves = {"max_train_steps": 4, "save_every_n_steps": 2, "save_state": True}
    argv = flags(work["model"], work["config"], tmp_path / "out", **saves)
    done = fork(argv, fault="fsize@300000", HANGPROOF_HEARTBEAT=str(tmp_path / "beats"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: " in done.stderr and "larger than this file system or user may write" in done.stderr
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["tiny-step00000002.safetensors"]
