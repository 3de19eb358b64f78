"""The built-in trainer's loader workers deliver their batches whatever the length of TMPDIR."""

import sys

import pytest
from trainer_helpers import flags, fork, good

pytestmark = pytest.mark.slow


@pytest.mark.skipif(sys.platform == "win32", reason="sockets as on Unix")
def test_the_built_in_trainer_trains_with_workers_and_a_long_tmpdir(work, tmp_path):
    long_folder = tmp_path / ("x" * 120)
    long_folder.mkdir()
    argv = flags(work["model"], work["config"], tmp_path / "out", max_data_loader_n_workers=1, max_train_steps=2)
    done = good(fork(argv, TMPDIR=str(long_folder)))
    assert f"warning: TMPDIR ({long_folder}) is too long" in done.stdout
