"""Loader workers deliver their batches whatever the length of TMPDIR."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_sd_scripts
from trainer_helpers import flags, make_config, make_images, train

from guards import socket_folder

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sockets as on Unix")

LOADER = """
import sys
if "guarded" in sys.argv:
    from guards import socket_folder
    print(socket_folder.choose())
import tempfile, torch
from torch.utils.data import DataLoader
torch.multiprocessing.set_sharing_strategy("file_descriptor")
print("batch", [int(b) for b in DataLoader(torch.arange(3), batch_size=None, num_workers=1, timeout=%d)], tempfile.gettempdir())
"""


@pytest.fixture
def long_folder(tmp_path):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    return folder


def load(folder: Path, *words: str, timeout_s: int = 60) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", LOADER % timeout_s, *words], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip


def test_batches_arrive_with_a_long_tmpdir_which_stays(long_folder):
    done = load(long_folder, "guarded")
    assert f"batch [0, 1, 2] {long_folder}" in done.stdout, done.stderr
    assert f"TMPDIR ({long_folder}) is too long for the sockets of loader workers; they are in /" in done.stdout
    made = done.stdout.splitlines()[0].rpartition(" ")[2]
    assert not Path(made).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the strategy that Linux uses")
def test_without_it_every_batch_is_lost(long_folder):
    done = load(long_folder, timeout_s=3)
    assert done.returncode and "path too long" in done.stderr


def test_a_short_tmpdir_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(socket_folder.tempfile, "tempdir", "/tmp")
    assert socket_folder.choose() == "" and socket_folder.tempfile.tempdir == "/tmp"
    assert not socket_folder.fits("/" + "é" * 40)  # bytes count, not letters


def test_when_no_folder_can_be_used_the_error_names_tmpdir_and_what_to_do(long_folder, monkeypatch):
    monkeypatch.setattr(socket_folder.tempfile, "tempdir", str(long_folder))
    monkeypatch.setattr(socket_folder, "SHORT", ("/no/such/folder", str(long_folder)))
    monkeypatch.setattr(socket_folder.multiprocessing.process.current_process(), "_config", {})
    with pytest.raises(socket_folder.TooLong, match=r"TMPDIR \(.*Set TMPDIR to a shorter folder"):
        socket_folder.choose()
    assert socket_folder.tempfile.tempdir == str(long_folder)


def test_the_built_in_trainer_trains_with_workers_and_a_long_tmpdir(long_folder, tmp_path):
    config = make_config(tmp_path / "dataset.toml", make_images(tmp_path / "images", 2))
    argv = flags(
        tmp_path / "models" / "tiny-flux", config, tmp_path / "out", max_data_loader_n_workers=1, max_train_steps=2
    )
    done = train(argv, TMPDIR=str(long_folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"warning: TMPDIR ({long_folder}) is too long" in done.stdout and "model saved." in done.stdout


@pytest.mark.timeout(400)
def test_a_real_training_has_workers_with_a_long_tmpdir(long_folder, tmp_path):
    tiny_sd_scripts.need()
    work = tiny_sd_scripts.workdir()
    arguments = tiny_sd_scripts.arguments(work, tmp_path / "out", max_train_steps="2", max_data_loader_n_workers="1")
    done = tiny_sd_scripts.run(arguments, tiny_sd_scripts.environment(work, TMPDIR=str(long_folder)), 300)
    assert done.returncode == 0, done.stdout
    assert f"hangproof: TMPDIR ({long_folder}) is too long" in done.stdout
