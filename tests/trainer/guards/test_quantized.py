"""Weights in float8 are cast once: later starts read a copy, which is the same to the bit, and is never needed."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from guards import quantized
from trainer import models
from trainer.families.flux import FAMILY
from trainer.quantized import KINDS

CPU = torch.device("cpu")


@pytest.fixture
def model(model, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "RESERVE", 0)
    at_once = SimpleNamespace(Thread=lambda target, **_: SimpleNamespace(start=target))
    monkeypatch.setattr(quantized, "threading", at_once)
    shutil.copytree(model, tmp_path / "m", ignore=shutil.ignore_patterns(quantized.FOLDER))
    return tmp_path / "m"


def load(model, dtype=torch.bfloat16, kind="float8"):
    return models.load_denoiser(model, FAMILY, dtype, CPU, kind, lambda done, total: None)


def copies(model):
    return sorted((model / "transformer" / quantized.FOLDER).glob("*"))


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    as_bytes = lambda tensor: (tensor.dtype, tensor.reshape(-1).view(torch.uint8).tolist())  # noqa: E731
    return a.keys() == b.keys() and all(as_bytes(a[name]) == as_bytes(b[name]) for name in a)


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_start_reads_only_the_copy_and_has_the_same_weights(model, monkeypatch, kind):
    first = load(model, kind=kind)
    (copy,) = copies(model)
    seen, real = [], safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda file, **more: (seen.append(Path(file)), real(file, **more))[1])
    second = load(model, kind=kind)
    assert seen == [copy] and same(first, second) and copies(model) == [copy]
    assert "StoredLinear" in {type(module).__name__ for module in second.modules()}
    models.check(model)  # the folder of the copy is no part of the model
    load(model, torch.float32, kind)
    assert set(copies(model)).isdisjoint([copy]), "another cast has another copy"


@pytest.mark.parametrize("damage", ["truncated", "another model's"])
def test_a_copy_that_cannot_be_used_is_made_again(model, capsys, damage):
    first = load(model)
    (copy,) = copies(model)
    data = copy.read_bytes()
    if damage == "truncated":
        copy.write_bytes(data[:-100])
    else:
        save_file({"other": torch.ones(1)}, copy)
    assert same(first, load(model))
    assert "is made again" in capsys.readouterr().out
    assert copies(model) == [copy] and copy.read_bytes() == data


def test_no_copy_is_written_without_float8_by_another_rank_and_by_a_start_that_fails(model, monkeypatch):
    load(model, kind="")
    with monkeypatch.context() as rank:
        rank.setenv("RANK", "1")
        load(model)
    monkeypatch.setattr("trainer.quantized.convert", Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        load(model)
    assert copies(model) == []
