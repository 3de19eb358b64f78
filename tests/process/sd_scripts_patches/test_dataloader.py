"""Settings of every data loader."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from sd_scripts_patches import dataloader


@pytest.mark.parametrize(
    ("platform", "given", "made"),
    [
        ("linux", {"num_workers": 2}, {"num_workers": 2, "timeout": 61.0, "pin_memory": True}),
        ("linux", {"num_workers": 2, "timeout": 7}, {"num_workers": 2, "timeout": 7}),
        ("win32", {"num_workers": 8, "persistent_workers": True}, {"num_workers": 0, "persistent_workers": False}),
        ("darwin", {"num_workers": 8, "prefetch_factor": 4}, {"num_workers": 0, "prefetch_factor": None, "timeout": 0}),
    ],
)
def test_every_loader_is_made_with_settings_that_cannot_hang(monkeypatch, platform, given, made):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dataloader.sys, "platform", platform)
    monkeypatch.setenv("HANGPROOF_DATALOADER_TIMEOUT_S", "61")  # the user's
    got = {}

    def init(self, dataset, num_workers=0, pin_memory=False, timeout=0, prefetch_factor=None, persistent_workers=False):
        got.update(locals())

    dataloader._safe_settings(init)(None, [1, 2], **given)
    assert {name: got[name] for name in made} == made
    assert got["dataset"] == [1, 2]


@pytest.mark.parametrize(
    ("limit_s", "first_s", "number", "expected"),
    [(60, 300, 1, 300), (60, 300, 2, 60), (400, 300, 1, 400), (60, 0, 1, 0), (60, 0, 2, 60), (0, 300, 1, 0)],
)
def test_a_batch_has_the_limit_of_its_place_and_0_is_none(monkeypatch, limit_s, first_s, number, expected):
    monkeypatch.setenv("HANGPROOF_DATALOADER_TIMEOUT_S", str(limit_s))
    monkeypatch.setenv("HANGPROOF_DATALOADER_FIRST_BATCH_S", str(first_s))
    allowed = []
    noted = lambda seconds, what: allowed.append(seconds) or contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(dataloader.session, "Deadline", noted)
    iterator = SimpleNamespace(_num_yielded=number - 1, _task_info={}, _rcvd_idx=0, _timeout=60)
    torchs = dataloader._batch_from_workers(lambda self: self._timeout)(iterator)
    assert (allowed, torchs) == ([expected], expected and expected + 5)
