"""The order of an epoch's batches is captured before it is drawn, and drawn again."""

import json
from types import SimpleNamespace

import pytest
import torch

from sd_scripts_patches import data_order
from sd_scripts_patches.trainer_state import ResumeError


@pytest.mark.parametrize("own", [False, True], ids=["torch's generator", "the sampler's own"])
def test_an_epoch_is_drawn_again_as_it_was_captured(own):
    loader = torch.utils.data.DataLoader(range(20), shuffle=True, generator=torch.Generator() if own else None)
    captured = json.loads(json.dumps(data_order.capture(loader)))
    first, second = [int(batch) for batch in loader], [int(batch) for batch in loader]
    assert first != second and bool(captured["sampler"]) == own
    data_order.restore(loader, captured)
    assert [int(batch) for batch in loader] == first


def test_the_innermost_sampler_is_found_and_a_loader_without_one_of_indices_is_refused():
    inner = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(2)), 1, drop_last=False)
    assert data_order.innermost_batch_sampler(SimpleNamespace(batch_sampler=inner)) is inner
    with pytest.raises(ResumeError, match=r"has no sampler of indices \(NoneType\)"):
        data_order.innermost_batch_sampler(None)
