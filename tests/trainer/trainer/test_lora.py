"""The LoRA: which matrices it is on, and what its file says of it."""

import pytest
import torch
from flux_parts import arguments, loaded
from safetensors import safe_open

from trainer import lora
from trainer.families.flux import FAMILY

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("blocks", "layers"), [("double", 2 * 14), ("single", 4 * 6), ("all", 2 * 14 + 4 * 6)])
def test_the_lora_sits_on_every_matrix_of_the_selected_blocks(model, blocks, layers):
    _, parameters = loaded(model, blocks)
    assert len(parameters) == 2 * layers
    assert all(p.requires_grad and p.dtype == torch.float32 for p in parameters.values())


def test_the_lora_file_is_always_the_same_and_describes_itself(model, tmp_path):
    _, parameters = loaded(model, alpha=2.0)
    facts = {"images": [], "batches": 1, "epochs": 1, "steps": 3}
    about = lora.describe(
        arguments(network_alpha=2.0, network_dim=4), FAMILY, architecture="flux-1-dev/lora", epoch=1, step=3, **facts
    )
    data = lora.to_file(parameters, FAMILY.prefix, 2.0 / 4, None, about)
    assert data == lora.to_file(parameters, FAMILY.prefix, 2.0 / 4, None, about)
    (tmp_path / "x.safetensors").write_bytes(data)
    with safe_open(tmp_path / "x.safetensors", "pt") as content:
        assert content.metadata() == about and about["ss_network_dim"] == "4"
        assert len(list(content.keys())) == len(parameters)
