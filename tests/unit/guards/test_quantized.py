"""A copy of frozen weights in fewer bits: made once from one model, readable, and never in the way."""

import os
from types import SimpleNamespace

import pytest
import torch
from runs_helpers import made, written
from safetensors.torch import load_file

from guards import quantized


def test_a_copy_that_cannot_be_written_is_reported_once_and_hinders_nothing(tmp_path, capsys):
    weights = written(tmp_path / "flux.safetensors", b"weights")
    (tmp_path / quantized.FOLDER).write_text("in the way of the folder")
    copy = quantized.Copy(tmp_path, [weights], "float8")
    for name in ("weight", "bias"):
        copy.add(name, torch.ones(1))
    copy.finish()
    copy.give_up()
    said = capsys.readouterr().out
    assert said.count("each start casts them") == 1 and str(tmp_path / quantized.FOLDER) in said
    assert not copy.path.exists()


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "RESERVE", 0)
    at_once = SimpleNamespace(Thread=lambda target, **_: SimpleNamespace(start=target))
    monkeypatch.setattr(quantized, "threading", at_once)
    file = written(tmp_path / "flux-00001-of-00002.safetensors", b"a" * 100_000 + b"b" * 100_000)
    return file


def test_another_model_or_another_cast_has_another_copy(model):
    seen, at = [quantized.key([model], recipe) for recipe in ("float8", "int8")], model.stat()
    for place in (0, 199_999):
        data = bytearray(model.read_bytes())
        data[place] ^= 1
        model.write_bytes(data)
        os.utime(model, ns=(at.st_atime_ns, at.st_mtime_ns))
        seen.append(quantized.key([model], "float8"))
    os.utime(model, ns=(1, 1))
    assert len({*seen, quantized.key([model], "float8")}) == 5 and {len(one) for one in seen} == {16}


def test_a_copy_is_complete_when_it_has_its_name_and_replaces_older_ones_of_its_model(model):
    copy = quantized.Copy(model.parent, [model], "float8")
    folder = made(copy.path.parent)
    assert copy.path.name.startswith("flux-") and len(copy.path.name) == len("flux-.safetensors") + 16
    names = (f"flux-{'0' * 16}.safetensors", f"flux-fp8-{'0' * 16}.safetensors", "recent.tmp")
    old, other, recent = (folder / name for name in names)
    for file in (old, other, recent):
        file.touch()
    tensors = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(5).to(torch.float8_e4m3fn)}
    for name, tensor in tensors.items():
        copy.add(name, tensor)
    assert not copy.path.exists() and copy.temporary.exists()
    copy.finish()
    assert {file.name for file in folder.iterdir()} == {copy.path.name, other.name, recent.name}
    found = load_file(copy.path)
    assert all(found[n].dtype == t.dtype and torch.equal(found[n].float(), t.float()) for n, t in tensors.items())
    assert int.from_bytes(copy.path.read_bytes()[:8], "little") % 4096 == 4088, "the tensors begin at the end of a page"
    os.utime(recent, (1, 1))
    quantized.Copy(model.parent, [model], "float8")
    assert copy.path.exists() and not recent.exists(), "what a kill left goes, though no copy is made"
