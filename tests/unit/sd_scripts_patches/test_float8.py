"""`--fp8_base` of sd-scripts casts its model once. That the next start reads the copy: upstream's test_split_mode.py."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from guards import quantized
from sd_scripts_patches import float8


class Model(torch.nn.Linear):
    @property
    def dtype(self):
        return self.weight.dtype


@pytest.fixture
def loader(tmp_path, monkeypatch):
    """The patched loader, and the model's file."""
    monkeypatch.setattr(quantized, "RESERVE", 0)
    path = tmp_path / "flux.safetensors"
    save_file({n: t.to(torch.bfloat16) for n, t in torch.nn.Linear(8, 6).state_dict().items()}, path)

    def load_flow_model(ckpt_path, dtype, device, disable_mmap=False):
        with torch.device("meta"):
            model = Model(8, 6)
        model.load_state_dict(load_file(ckpt_path), strict=False, assign=True)
        return False, model if dtype is None else model.to(dtype)

    monkeypatch.setattr(quantized.Copy, "finish", quantized.Copy._complete)  # in no thread
    return SimpleNamespace(load=float8._load_flow_model(load_flow_model), path=path)


def bits(model):
    return {name: tensor.view(torch.uint8).tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("damage", ["lacks a tensor", "truncated"])
def test_a_copy_that_cannot_be_used_is_made_again(loader, capsys, damage):
    loader.load(str(loader.path), torch.bfloat16, "cpu")
    assert copies(loader.path.parent) == [], "only --fp8_base casts"
    first = loader.load(str(loader.path), None, "cpu")[1]
    (copy,) = copies(loader.path.parent)
    if damage == "truncated":
        copy.write_bytes(copy.read_bytes()[:-1])
    else:
        save_file({"weight": load_file(copy)["weight"]}, copy)
    assert bits(loader.load(str(loader.path), None, "cpu")[1]) == bits(first.to(torch.float8_e4m3fn)) == bits(first)
    assert "is incomplete" in capsys.readouterr().out and copies(loader.path.parent) == [copy]


def copies(folder):
    return sorted((folder / quantized.FOLDER).glob("*"))
