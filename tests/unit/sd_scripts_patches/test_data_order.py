"""The order of an epoch's batches is captured before it is drawn, and drawn again."""

import json

import pytest
import torch

from sd_scripts_patches import data_order


@pytest.mark.parametrize("own", [False, True], ids=["torch's generator", "the sampler's own"])
def test_an_epoch_is_drawn_again_as_it_was_captured(own):
    loader = torch.utils.data.DataLoader(range(20), shuffle=True, generator=torch.Generator() if own else None)
    captured = json.loads(json.dumps(data_order.capture(loader)))
    first, second = [int(batch) for batch in loader], [int(batch) for batch in loader]
    assert first != second and bool(captured["sampler"]) == own
    data_order.restore(loader, captured)
    assert [int(batch) for batch in loader] == first
