"""DataLoader settings that cannot hang; with workers: tests/process/sd_scripts_patches/test_runner.py."""

import itertools
import sys

import torch

from guards import loader


def test_torch_accepts_every_combination(monkeypatch):
    choices = itertools.product([0, 2], [False, True], [None, 3], [0, 7], ["linux", "win32", "darwin"])
    for workers, persistent, prefetch, timeout, platform in choices:
        with monkeypatch.context() as here:
            here.setattr(sys, "platform", platform)
            made = loader.rules(workers, persistent, prefetch, timeout)
        torch.utils.data.DataLoader([1, 2, 3], **made)  # raises ValueError for settings that contradict each other
