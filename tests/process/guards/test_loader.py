"""DataLoader settings that cannot hang, and sockets where TMPDIR is too long for them; with workers:
tests/process/sd_scripts_patches/test_runner.py."""

import itertools
import sys

import pytest
import torch

from guards import loader


def test_a_short_tmpdir_stays_and_when_no_folder_can_be_used_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(loader.tempfile, "tempdir", "/tmp")
    assert loader.move_sockets() == "" and loader.tempfile.tempdir == "/tmp"
    assert not loader.sockets_fit("/" + "é" * 40)  # bytes count, not letters
    long_folder = tmp_path / ("x" * 120)
    long_folder.mkdir()
    monkeypatch.setattr(loader.tempfile, "tempdir", str(long_folder))
    monkeypatch.setattr(loader, "SHORT", ("/no/such/folder", str(long_folder)))
    monkeypatch.setattr(loader.multiprocessing.process.current_process(), "_config", {})
    with pytest.raises(loader.TooLong, match=r"TMPDIR \(.*Set TMPDIR to a shorter folder"):
        loader.move_sockets()
    assert loader.tempfile.tempdir == str(long_folder)


def test_torch_accepts_every_combination(monkeypatch):
    choices = itertools.product([0, 2], [False, True], [None, 3], [0, 7], ["linux", "win32", "darwin"])
    for workers, persistent, prefetch, timeout, platform in choices:
        with monkeypatch.context() as here:
            here.setattr(sys, "platform", platform)
            made = loader.rules(workers, persistent, prefetch, timeout)
        torch.utils.data.DataLoader([1, 2, 3], **made)  # raises ValueError for settings that contradict each other
