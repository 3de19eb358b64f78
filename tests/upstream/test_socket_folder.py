"""sd-scripts' loader workers deliver their batches whatever the length of TMPDIR."""

import pytest
import tiny_sd_scripts


@pytest.mark.timeout(400)
def test_a_real_training_has_workers_with_a_long_tmpdir(tmp_path):
    long_folder = tmp_path / ("x" * 120)
    long_folder.mkdir()
    tiny_sd_scripts.need()
    work = tiny_sd_scripts.workdir()
    arguments = tiny_sd_scripts.arguments(work, tmp_path / "out", max_train_steps="2", max_data_loader_n_workers="1")
    done = tiny_sd_scripts.run(arguments, tiny_sd_scripts.environment(work, TMPDIR=str(long_folder)), 300)
    assert done.returncode == 0, done.stdout
    assert f"hangproof: TMPDIR ({long_folder}) is too long" in done.stdout
