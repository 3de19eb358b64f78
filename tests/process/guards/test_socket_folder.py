"""Loader workers deliver their batches whatever the length of TMPDIR."""

import sys
from pathlib import Path

import children
import pytest

from guards import socket_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sockets as on Unix")

LOADER = """
from guards import socket_folder
print(socket_folder.choose())
import tempfile, torch
from torch.utils.data import DataLoader
torch.multiprocessing.set_sharing_strategy("file_descriptor")
print("batch", [int(b) for b in DataLoader(torch.arange(3), batch_size=None, num_workers=1, timeout=60)], tempfile.gettempdir())
"""


@pytest.fixture
def long_folder(tmp_path):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_batches_arrive_with_a_long_tmpdir_which_stays(long_folder):
    done = children.run(LOADER, TMPDIR=long_folder)
    assert f"batch [0, 1, 2] {long_folder}" in done.stdout, done.stderr
    assert f"TMPDIR ({long_folder}) is too long for the sockets of loader workers; they are in /" in done.stdout
    made = done.stdout.splitlines()[0].rpartition(" ")[2]
    assert not Path(made).exists()


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
