"""Settings of every data loader."""

import pytest
import torch

from sd_scripts_patches import dataloader


@pytest.mark.parametrize(
    ("platform", "given", "made"),
    [
        ("linux", {"num_workers": 2}, {"num_workers": 2, "timeout": 60.0, "pin_memory": True}),
        ("linux", {"num_workers": 2, "timeout": 7}, {"num_workers": 2, "timeout": 7}),
        ("win32", {"num_workers": 8, "persistent_workers": True}, {"num_workers": 0, "persistent_workers": False}),
        ("darwin", {"num_workers": 8, "prefetch_factor": 4}, {"num_workers": 0, "prefetch_factor": None, "timeout": 0}),
    ],
)
def test_every_loader_is_made_with_settings_that_cannot_hang(monkeypatch, platform, given, made):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dataloader.sys, "platform", platform)
    got = {}

    def init(self, dataset, batch_size=1, num_workers=0, pin_memory=False, timeout=0, prefetch_factor=None, persistent_workers=False):  # fmt: skip
        got.update(locals())

    dataloader._safe_settings(init)(None, [1, 2], **given)
    assert {name: got[name] for name in made} == made
    assert got["dataset"] == [1, 2]
