"""DataLoader settings that cannot hang, and workers that deliver their batches whatever the length of TMPDIR."""

import itertools
import sys
from pathlib import Path

import children
import pytest
import torch

from guards import loader

LOADER = """
from guards import loader
print(loader.move_sockets())
import tempfile, torch
from torch.utils.data import DataLoader
torch.multiprocessing.set_sharing_strategy("file_descriptor")
batches = DataLoader(torch.arange(3), batch_size=None, num_workers=1, timeout=60)
print("batch", [int(b) for b in batches], tempfile.gettempdir())
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


def test_a_short_tmpdir_stays_and_when_no_folder_can_be_used_the_error_says_what_to_do(long_folder, monkeypatch):
    monkeypatch.setattr(loader.tempfile, "tempdir", "/tmp")
    assert loader.move_sockets() == "" and loader.tempfile.tempdir == "/tmp"
    assert not loader.sockets_fit("/" + "é" * 40)  # bytes count, not letters
    monkeypatch.setattr(loader.tempfile, "tempdir", str(long_folder))
    monkeypatch.setattr(loader, "SHORT", ("/no/such/folder", str(long_folder)))
    monkeypatch.setattr(loader.multiprocessing.process.current_process(), "_config", {})
    with pytest.raises(loader.TooLong, match=r"TMPDIR \(.*Set TMPDIR to a shorter folder"):
        loader.move_sockets()
    assert loader.tempfile.tempdir == str(long_folder)


def test_the_users_limit_of_a_batch_counts_where_the_loader_has_none(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HANGPROOF_DATALOADER_TIMEOUT_S", "7")
    assert [loader.rules(1, timeout=asked)["timeout"] for asked in (0, 90)] == [7, 90]


def test_torch_accepts_every_combination(monkeypatch):
    choices = itertools.product([0, 2], [False, True], [None, 3], [0, 7], ["linux", "win32", "darwin"])
    for workers, persistent, prefetch, timeout, platform in choices:
        with monkeypatch.context() as here:
            here.setattr(sys, "platform", platform)
            made = loader.rules(workers, persistent, prefetch, timeout)
        torch.utils.data.DataLoader([1, 2, 3], **made)  # raises ValueError for settings that contradict each other
