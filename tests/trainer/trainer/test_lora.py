"""The LoRA: which matrices it is on. What its file says of it: test_loop.py."""

import pytest
import torch
from flux_parts import loaded

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("blocks", "layers"), [("double", 2 * 14), ("single", 4 * 6), ("all", 2 * 14 + 4 * 6)])
def test_the_lora_sits_on_every_matrix_of_the_selected_blocks(model, blocks, layers):
    _, parameters = loaded(model, blocks)
    assert len(parameters) == 2 * layers
    assert all(p.requires_grad and p.dtype == torch.float32 for p in parameters.values())
