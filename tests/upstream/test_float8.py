"""`--fp8_base` of sd-scripts casts its model once: the next start reads the copy, and trains the same to the digit."""

from types import SimpleNamespace

import pytest
import resume_helpers as helpers
import tiny_sd_scripts as tiny

from guards import quantized
from sd_scripts_patches import float8

torch = pytest.importorskip("torch")


class Model(torch.nn.Linear):
    @property
    def dtype(self):
        return self.weight.dtype


@pytest.fixture
def loader(tmp_path, monkeypatch):
    """(the patched loader, the files that the trainer's own one has read, the model's file)."""
    from safetensors.torch import load_file, save_file

    monkeypatch.setattr(quantized, "RESERVE", 0)
    path, read = tmp_path / "flux.safetensors", []
    save_file({n: t.to(torch.bfloat16) for n, t in torch.nn.Linear(8, 6).state_dict().items()}, path)

    def load_flow_model(ckpt_path, dtype, device, disable_mmap=False):
        read.append(ckpt_path)
        with torch.device("meta"):
            model = Model(8, 6)
        model.load_state_dict(load_file(ckpt_path), strict=False, assign=True)
        return False, model if dtype is None else model.to(dtype)

    finish = quantized.Copy.finish
    monkeypatch.setattr(quantized.Copy, "finish", lambda copy: (finish(copy), copy.wait()))
    return SimpleNamespace(load=float8._load_flow_model(load_flow_model), read=read, path=path)


def bits(model):
    return {name: tensor.view(torch.uint8).tolist() for name, tensor in model.state_dict().items()}


def copies(folder):
    return sorted((folder / quantized.FOLDER).glob("*"))


def test_the_copy_is_what_the_trainer_casts(loader):
    first = loader.load(str(loader.path), None, "cpu", disable_mmap=True)[1]
    (copy,) = copies(loader.path.parent)
    second = loader.load(str(loader.path), None, "cpu")[1]
    assert loader.read == [str(loader.path), str(copy)]
    assert first.dtype == second.dtype == torch.float8_e4m3fn and bits(first) == bits(second)
    assert bits(first) == bits(first.to(torch.float8_e4m3fn)), "the trainer's own cast changes nothing any more"


def test_without_fp8_base_nothing_changes(loader):
    assert loader.load(str(loader.path), torch.bfloat16, "cpu")[1].dtype == torch.bfloat16
    assert copies(loader.path.parent) == []


def test_a_copy_that_lacks_a_tensor_is_made_again(loader, capsys):
    from safetensors.torch import load_file, save_file

    loader.load(str(loader.path), None, "cpu")
    (copy,) = copies(loader.path.parent)
    save_file({"weight": load_file(copy)["weight"]}, copy)
    assert not any(t.is_meta for t in loader.load(str(loader.path), None, "cpu")[1].state_dict().values())
    assert "is incomplete" in capsys.readouterr().out and copies(loader.path.parent) == [copy]


@pytest.mark.long
@pytest.mark.skipif(bool(tiny.why_not()), reason=tiny.why_not() or "-")
def test_real_training_is_the_same_with_the_copy_and_without_the_patch(tmp_path):
    work = tiny.workdir()
    weights = tmp_path / "flux.safetensors"
    weights.write_bytes((work / "flux.safetensors").read_bytes())

    def train(name, env=()):
        out = tmp_path / name
        out.mkdir()
        changed = {"mixed_precision": "bf16", "pretrained_model_name_or_path": str(weights)}
        result = helpers.train(work, out, "--max_train_steps", "3", "--fp8_base", env=env, **changed)
        assert result.code == 0, result.log[-3000:]
        return tiny.losses(out / "losses"), "Loaded fp8 FLUX model" in result.log

    plain, loaded = train("plain", {"HANGPROOF_WITHOUT": "float8"})
    assert not loaded and copies(tmp_path) == []
    assert train("first") == (plain, True)
    (copy,) = copies(tmp_path)
    written = copy.stat().st_mtime_ns
    assert train("second") == (plain, True)
    assert copies(tmp_path) == [copy] and copy.stat().st_mtime_ns == written
