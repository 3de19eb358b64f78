"""States count once whole: every kind of damage is seen, and no kill leaves a state that looks whole."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from guards import checkpoint

ROOT = Path(__file__).resolve().parent.parent


def make(folder: Path, step: int, value: float = 1.0, name: str = "lora") -> Path:
    final = folder / f"{name}-step{step:08d}-state"
    with checkpoint.writing(final, step=step, epoch=1, note="ok") as temporary:
        save_file({"w": np.full((64, 64), value, dtype=np.float32)}, temporary / "model.safetensors")
        (temporary / "train_state.json").write_text(json.dumps({"step": step}))
    return final


def test_a_written_state_verifies_and_is_the_newest(tmp_path):
    make(tmp_path, 5)
    newest = make(tmp_path, 10)
    assert checkpoint.problems(newest, deep=True) == []
    assert checkpoint.newest_valid(tmp_path, "lora") == newest
    assert checkpoint.guard_of(newest)["step"] == 10 and checkpoint.guard_of(newest)["note"] == "ok"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("damage", ["truncated", "zeroed", "missing", "no guard", "half a guard"])
def test_damage_is_named_and_the_one_before_is_chosen(tmp_path, damage):
    older, newest = make(tmp_path, 5), make(tmp_path, 10)
    weights = newest / "model.safetensors"
    if damage == "truncated":
        os.truncate(weights, weights.stat().st_size // 2)
    elif damage == "zeroed":
        weights.write_bytes(bytes(weights.stat().st_size))
    elif damage == "missing":
        weights.unlink()
    elif damage == "no guard":
        (newest / checkpoint.GUARD).unlink()
    else:
        os.truncate(newest / checkpoint.GUARD, 30)
    assert len(checkpoint.problems(newest)) == 1
    assert checkpoint.newest_valid(tmp_path, "lora") == older


def test_nan_weights_load_silently_elsewhere_and_are_named_here(tmp_path):
    state = make(tmp_path, 10, value=float("nan"))
    assert checkpoint.problems(state) == []
    assert checkpoint.problems(state, deep=True) == ["model.safetensors: w holds NaN or infinity"]
    command = [sys.executable, "-m", "guards.checkpoint", "verify", str(state), "--deep", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["problems"] == ["model.safetensors: w holds NaN or infinity"]


def test_bfloat16_infinity_is_seen_and_finite_bfloat16_is_not(tmp_path):
    import torch
    from safetensors.torch import save_file as save_torch

    save_torch({"a": torch.full((8,), 3e38, dtype=torch.bfloat16)}, tmp_path / "good.safetensors")
    save_torch({"a": torch.tensor([1.0, float("inf")], dtype=torch.bfloat16)}, tmp_path / "bad.safetensors")
    assert checkpoint.non_finite(tmp_path / "good.safetensors") is None
    assert checkpoint.non_finite(tmp_path / "bad.safetensors") == "a"


def test_an_optimizer_that_does_not_load_is_named(tmp_path):
    import torch

    for name, data in (("whole", None), ("broken", b"PK\x03\x04 not a zip")):
        with checkpoint.writing(tmp_path / f"{name}-state", step=1, epoch=1) as temporary:
            torch.save({"state": {0: torch.ones(3)}}, temporary / "optimizer.bin")
            if data:
                (temporary / "optimizer.bin").write_bytes(data)
    assert checkpoint.problems(tmp_path / "whole-state", deep=True) == []
    assert "optimizer.bin: does not load" in checkpoint.problems(tmp_path / "broken-state", deep=True)[0]


def test_an_error_while_writing_leaves_the_old_state(tmp_path):
    old = make(tmp_path, 10, value=1.0)
    with pytest.raises(RuntimeError, match="mid-save"), checkpoint.writing(old, step=10, epoch=1) as temporary:
        (temporary / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("mid-save")
    assert checkpoint.problems(old, deep=True) == []
    assert len(list(tmp_path.iterdir())) == 1


def damage(state: Path) -> None:
    os.truncate(state / "model.safetensors", 10)


def test_an_old_state_goes_once_a_newer_one_verifies(tmp_path):
    old, new = make(tmp_path, 5), make(tmp_path, 10)
    assert checkpoint.retire(old) is True
    assert [p.name for p in tmp_path.iterdir()] == [new.name]


@pytest.mark.parametrize("others", ["none", "damaged", "of another LoRA"])
def test_the_last_good_state_is_never_deleted(tmp_path, others):
    good = make(tmp_path, 5)
    if others == "damaged":
        for step in (10, 15):
            damage(make(tmp_path, step))
    elif others == "of another LoRA":
        make(tmp_path, 10, name="other")
    assert checkpoint.retire(good) is False
    assert checkpoint.problems(good, deep=True) == []


def test_a_damaged_or_unguarded_state_goes_too(tmp_path):
    """Neither is the last good one. Plain accelerate writes no guard file."""
    damaged, good, plain = make(tmp_path, 5), make(tmp_path, 10), tmp_path / "lora-step00000015-state"
    damage(damaged)
    plain.mkdir()
    assert checkpoint.retire(damaged) and checkpoint.retire(plain)
    assert [p.name for p in tmp_path.iterdir()] == [good.name]


def test_what_a_kill_leaves_of_a_deletion_is_swept_and_never_seen_as_a_state(tmp_path, monkeypatch):
    old, new = make(tmp_path, 5), make(tmp_path, 10)
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)  # as if killed right after the renaming
    assert checkpoint.retire(old)
    monkeypatch.undo()
    assert checkpoint.states(tmp_path) == [new] and len(list(tmp_path.iterdir())) == 2
    assert len(checkpoint.sweep(tmp_path)) == 1
    assert [p.name for p in tmp_path.iterdir()] == [new.name]


@pytest.mark.parametrize(("left", "step"), [(("old",), 1), (("old", "tmp"), 2), (("tmp",), 2)])
def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path, left, step):
    """The state has no name for a moment: the old one is moved away, the new one not yet in its place."""
    final = tmp_path / "lora-state"
    for number, what in ((1, "old"), (2, "tmp")):
        with checkpoint.writing(final, step=number, epoch=1) as temporary:
            (temporary / "part.bin").write_bytes(b"x")
        if what in left:
            os.replace(final, tmp_path / f".lora-state.77.{what}")
        elif final.exists():
            shutil.rmtree(final)
    assert checkpoint.newest_valid(tmp_path) is None
    checkpoint.sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["lora-state"]
    assert checkpoint.newest_valid(tmp_path) == final and checkpoint.guard_of(final)["step"] == step


def test_a_bad_state_is_set_aside_with_its_reason_and_no_longer_seen(tmp_path):
    aside = []
    for _ in range(2):
        aside.append(checkpoint.set_aside(make(tmp_path, 5), "its weights are truncated"))
    assert [p.name for p in aside] == ["lora-step00000005-state.bad", "lora-step00000005-state.bad-2"]
    assert (tmp_path / "lora-step00000005-state.bad.reason.txt").read_text() == "its weights are truncated\n"
    assert checkpoint.states(tmp_path) == []


WRITER = """
import sys
from pathlib import Path
from guards import checkpoint
folder, step = Path(sys.argv[1]), 0
while True:
    step += 1
    with checkpoint.writing(folder / f"lora-step{step % 3:08d}-state", step=step, epoch=1) as temporary:
        for part in range(4):
            (temporary / f"part{part}.bin").write_bytes(str(step).encode() * 20000)
    print(step, flush=True)
"""


def test_kills_at_twenty_moments_never_leave_a_state_that_lies(tmp_path):
    """Each state that verifies is whole, and at most one step is lost; what killed writers left is swept."""
    dice = random.Random(7)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], env=environment, stdout=subprocess.PIPE)
        said = [int(process.stdout.readline()) for _ in range(2)]
        time.sleep(dice.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        said += [int(line) for line in process.communicate()[0].split(b"\n") if line]
        newest = checkpoint.newest_valid(folder)
        step = checkpoint.guard_of(newest)["step"]
        assert step in (said[-1], said[-1] + 1)
        assert all((newest / f"part{p}.bin").read_bytes() == str(step).encode() * 20000 for p in range(4))
        checkpoint.sweep(folder)
        assert [p for p in folder.iterdir() if p.name.startswith(".")] == []


def test_a_sweep_takes_what_trainers_left_and_nothing_that_another_process_is_writing(tmp_path):
    left = [".x-step00000010-state.7.tmp", ".x-state.7.old", ".x-000002-state.7.gone", ".x.safetensors.7.tmp"]
    left += [".x-step00000004.7.tmp.safetensors", ".x_000010_00_1_42.7.tmp.png"]
    others = [".status.json.8.tmp", ".monitor.json.8.tmp", ".learned.json", ".x.safetensors", ".hangproof-cache"]
    for name in left[:3]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").touch()
    for name in left[3:] + others:
        (tmp_path / name).touch()
    assert checkpoint.sweep(tmp_path, "xx") == []  # another LoRA's run may be writing into the same folder
    assert sorted(p.name for p in checkpoint.sweep(tmp_path, "x")) == sorted(left)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(others)


def test_atomic_write_replaces_or_leaves(tmp_path):
    path = tmp_path / "status.json"
    checkpoint.atomic_write(path, "ä")
    checkpoint.atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    with pytest.raises(TypeError):
        checkpoint.atomic_write(path, None)
    assert path.read_bytes() == b"new" and len(list(tmp_path.iterdir())) == 1
