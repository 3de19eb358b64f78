"""DataLoader settings that cannot hang: a pure table."""

import itertools
import sys

import pytest

from guards.loader import rules


def test_no_workers_drop_persistence_prefetch_and_timeout_together():
    made = rules(0, persistent_workers=True, prefetch_factor=4, timeout=60)
    off = {"persistent_workers": False, "prefetch_factor": None}
    assert made == {"num_workers": 0, "timeout": 0.0, **off}


def test_the_users_limit_of_a_batch_counts_where_the_loader_has_none(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HANGPROOF_DATALOADER_TIMEOUT_S", "7")
    assert [rules(1, timeout=asked)["timeout"] for asked in (0, 90)] == [7, 90]


def test_torch_accepts_every_combination(monkeypatch):
    torch = pytest.importorskip("torch")
    choices = itertools.product([0, 2], [False, True], [None, 3], [0, 7], ["linux", "win32", "darwin"])
    for workers, persistent, prefetch, timeout, platform in choices:
        with monkeypatch.context() as here:
            here.setattr(sys, "platform", platform)
            made = rules(workers, persistent, prefetch, timeout)
        torch.utils.data.DataLoader([1, 2, 3], **made)  # raises ValueError for settings that contradict each other
