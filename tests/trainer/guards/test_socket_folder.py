"""The built-in trainer's loader workers deliver their batches whatever the length of TMPDIR."""

import sys

import pytest
from trainer_helpers import flags, fork, make_config, make_images

pytestmark = pytest.mark.slow


@pytest.mark.skipif(sys.platform == "win32", reason="sockets as on Unix")
def test_the_built_in_trainer_trains_with_workers_and_a_long_tmpdir(tmp_path):
    long_folder = tmp_path / ("x" * 120)
    long_folder.mkdir()
    config = make_config(tmp_path / "dataset.toml", make_images(tmp_path / "images", 2))
    argv = flags(
        tmp_path / "models" / "tiny-flux", config, tmp_path / "out", max_data_loader_n_workers=1, max_train_steps=2
    )
    done = fork(argv, TMPDIR=str(long_folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"warning: TMPDIR ({long_folder}) is too long" in done.stdout and "model saved." in done.stdout
