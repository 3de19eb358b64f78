"""The files of a snapshot: laid out once, checked, and written out as the trainer would have written them."""

import json
import math
import resource
import subprocess
import sys

import numpy
import pytest
import torch
from snapshot_helpers import newest, restored, take, writer

from guards import checkpoint, snapshot_files
from guards.snapshot_files import File, SnapshotError


def test_a_restored_state_has_the_files_that_the_trainer_would_have_written(ring, tmp_path, capsys):
    """With the kinds of values that states hold."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(8, 600))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model[1](torch.randn(2, 8)).sum().backward()
    model[0](torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    rng = {"numpy": numpy.random.get_state(), "torch": torch.get_rng_state(), "step": 3, "none": torch.empty(0, 4)}
    kinds = [torch.randn(5, 3).bfloat16(), torch.randn(7).half(), torch.tensor(True)]
    kinds += [torch.arange(5), torch.eye(3).to_sparse(), torch.randn(4, 6).T]  # the last in the order of SOAP
    files = [
        File("model.safetensors", "safetensors", dict(model.state_dict()), {"format": "pt"}),
        File("optimizer.bin", "torch", optimizer.state_dict()),
        File("random_states_0.pkl", "torch", rng),
        File("kinds.pt", "torch", kinds),
        File("train_state.json", "raw", b'{"current_step": 3}'),
    ]
    snapshot_files.write_state(tmp_path / "own", files, 3, 1)
    take(writer(ring), 3, files)
    folder = restored(ring)
    assert checkpoint.problems(folder, deep=True) == []
    assert checkpoint.guard_of(folder)["step"] == 3
    for file in files:
        assert (folder / file.name).read_bytes() == (tmp_path / "own" / file.name).read_bytes(), file.name
    command = [sys.executable, "-m", "guards.snapshot_files", str(newest(ring)), str(tmp_path)]  # as the monitor
    assert json.loads(subprocess.check_output(command, text=True)) == {"state": str(tmp_path / folder.name)}
    assert checkpoint.guard_of(tmp_path / folder.name)["files"] == checkpoint.guard_of(folder)["files"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # as a quota
    try:
        assert snapshot_files.main([str(newest(ring)), str(tmp_path / "full")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err == "File too large\n"
    assert snapshot_files.main([str(tmp_path / "none"), str(tmp_path)]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_a_layout_is_used_again_until_a_tensor_has_another_form(ring):
    def files(value, dtype=torch.float32, shape=(300, 3)):
        content = {"a": torch.full(shape, value, dtype=dtype), "b": torch.ones(5) * value, "n": value}
        return [File("a.pt", "torch", content)]

    first = snapshot_files.plan(files(1.0)).layout
    assert snapshot_files.plan(files(2.0), first).layout is first
    others = {"dtype": torch.bfloat16}, {"shape": (3, 300)}, {"shape": (301, 3)}
    assert all(snapshot_files.plan(files(2.0, **other), first).layout is not first for other in others)
    ours = writer(ring)
    for step, other in enumerate([{}, {}, {}, *others, {}], 1):
        take(ours, step, files(float(step), **other))
        found, wanted = torch.load(restored(ring) / "a.pt"), files(float(step), **other)[0].content
        assert torch.equal(found["a"], wanted["a"]) and torch.equal(found["b"], wanted["b"]), step
        assert found["a"].dtype == wanted["a"].dtype and found["n"] == wanted["n"]


def test_a_snapshot_of_nan_is_not_usable(ring):
    ours = writer(ring)
    for step, kind in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float64), 1):
        for bad in (math.nan, -math.inf):
            values = torch.ones(300_000, dtype=kind)
            values[-1] = bad
            take(ours, step, [File("model.safetensors", "safetensors", {"a": values})])
            assert "holds NaN or infinity" in checkpoint.problems(newest(ring), deep=True)[0]
    take(ours, 6, [File("model.safetensors", "safetensors", {"a": torch.tensor([-3e38, 3e38]), "b": torch.tensor(1)})])
    assert checkpoint.problems(newest(ring), deep=True) == []


@pytest.mark.parametrize("name", [snapshot_files.FILES, snapshot_files.TENSORS])
def test_a_changed_byte_is_found_and_the_snapshot_removed_with_its_reason(ring, name):
    take(writer(ring), 2, [File("a.pt", "torch", torch.ones(5000))])
    path = newest(ring)
    assert checkpoint.problems(path) == []
    data = bytearray((path / name).read_bytes())
    data[20] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(SnapshotError, match="wrong checksum"):
        restored(ring)
    assert not path.exists() and list(ring.rglob("*-state")) == []
