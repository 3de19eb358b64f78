"""The LoRA: which matrices it is on. What its file says of it: test_loop.py."""

import pytest
import torch
from flux_parts import loaded

from trainer import lora

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("blocks", "layers"), [("double", 2 * 14), ("single", 4 * 6), ("all", 2 * 14 + 4 * 6)])
def test_the_lora_sits_on_every_matrix_of_the_selected_blocks(model, blocks, layers):
    _, parameters = loaded(model, blocks)
    assert len(parameters) == 2 * layers
    assert all(p.requires_grad and p.dtype == torch.float32 for p in parameters.values())


def test_a_dropout_leaves_out_ranks_and_not_inputs_as_in_sd_scripts():
    """With one rank, a token has all of the LoRA, doubled, or nothing of it."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    parameters = lora.add(model, rank=1, alpha=1.0, blocks="0", dropout=0.5, seed=1, cast_inputs=True)
    parameters["0.lora_B.weight"].data.fill_(1.0)
    tokens = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        base, trained, drawn = model[0].base_layer(tokens), model(tokens), model.eval()(tokens)
    share = (trained - base).mean(dim=1) / (drawn - base).mean(dim=1)
    assert {round(one) for one in share.tolist()} == {0, 2} and torch.allclose(share, share.round(), atol=1e-3)
