"""A state counts only when it is complete: each kind of damage is found, and no kill leaves one that looks complete."""

import errno
import io
import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from runs_helpers import call
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from guards import checkpoint, file_contents


def make(folder: Path, step: int, value: float = 1.0, name: str = "lora", optimizer: bytes | None = None) -> Path:
    final = folder / f"{name}-step{step:08d}-state"
    with checkpoint.writing(final, step=step, epoch=1, note="ok") as temporary:
        save_file({"w": np.full((64, 64), value, dtype=np.float32)}, temporary / "model.safetensors")
        (temporary / "train_state.json").write_text(json.dumps({"step": step}))
        if optimizer is not None:
            (temporary / "optimizer.bin").write_bytes(optimizer)
    return final


DAMAGE = {
    "truncated": lambda state: os.truncate(state / "model.safetensors", 10),
    "zeroed": lambda state: (file := state / "model.safetensors").write_bytes(bytes(file.stat().st_size)),
    "missing": lambda state: (state / "model.safetensors").unlink(),
    "no guard": lambda state: (state / checkpoint.GUARD).unlink(),
    "half a guard": lambda state: os.truncate(state / checkpoint.GUARD, 30),
    "other": lambda one: (one / "hangproof.json").write_text('{"step":9,"files":{"/dev/null":{"size":0,"crc32":"0"}}}'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_written_state_verifies_and_is_the_newest_and_its_damage_is_named_and_the_one_before_chosen(tmp_path, damage):
    older, newest = make(tmp_path, 5), make(tmp_path, 10)
    assert checkpoint.problems(newest, deep=True) == [] and checkpoint.newest_valid(tmp_path, "lora") == newest
    assert checkpoint.guard_of(newest).items() >= {"step": 10, "note": "ok"}.items()
    assert {*tmp_path.iterdir()} == {older, newest}
    damage(newest)
    assert len(checkpoint.problems(newest)) == 1
    assert checkpoint.newest_valid(tmp_path, "lora") == older


def test_no_file_of_a_folder_is_passed_over(tmp_path, monkeypatch):
    for name in ("b/2", "a", "b/.x", ".git/config"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).touch()
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    assert checkpoint.files_below(tmp_path / "in", hidden=False) == [tmp_path / "in" / "a", tmp_path / "in" / "b" / "2"]
    assert len(checkpoint.files_below(tmp_path / "in")) == 4 and checkpoint.files_below(tmp_path / "gone") == []
    monkeypatch.setattr(os, "scandir", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(PermissionError):
        checkpoint.write_guard(tmp_path / "in", 1, 0)


def test_what_loads_without_an_error_and_is_not_finite_is_named_by_a_deep_check(tmp_path):
    state = make(tmp_path, 10, value=float("nan"))
    assert checkpoint.problems(state) == []
    assert checkpoint.problems(state, deep=True) == ["model.safetensors: w holds NaN or infinity"]
    for values, found in (([3e38] * 8, ""), ([1.0, float("inf")], "x.safetensors: a holds NaN or infinity")):
        save_torch({"a": torch.tensor(values, dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
        assert file_contents.damage(tmp_path / "x.safetensors") == found


BROKEN = {
    "no driver": "raise RuntimeError('CUDA driver initialization failed')",
    "no module": "import a_module_that_is_missing",
    "no memory": "def load(*args, **kwargs): raise MemoryError",
    "no memory for a tensor": 'def load(*a, **k): raise RuntimeError("DefaultCPUAllocator: can\'t allocate memory")',
    "damage": "def load(*a, **k): raise RuntimeError('PytorchStreamReader failed')",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_where_torch_cannot_check_the_optimizer_it_says_so_and_checks_the_rest(tmp_path, monkeypatch, broken):
    state = make(tmp_path, 10, optimizer=b"PK")
    (tmp_path / "torch.py").write_text(BROKEN[broken])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    result = checkpoint.verify(state, deep=True)
    if broken == "damage":
        assert result.problems == ("optimizer.bin: does not load: PytorchStreamReader failed",)
    else:
        assert not result.problems and "optimizer.bin: its content cannot be checked" in result.error
    assert checkpoint.verify(state).usable
    os.truncate(state / "model.safetensors", 30)
    assert "truncated" in checkpoint.problems(state, deep=True)[0]


def test_an_error_while_writing_leaves_the_old_state_and_a_folder_that_syncs_not_is_none(tmp_path, monkeypatch):
    real, refuse = os.fsync, failing(os.fsync, errno.EINVAL)
    monkeypatch.setattr(os, "fsync", lambda file: (real if stat.S_ISREG(os.fstat(file).st_mode) else refuse)(file))
    old = make(tmp_path, 10, value=1.0)
    with pytest.raises(RuntimeError, match="mid-save"), checkpoint.writing(old, step=10, epoch=1) as temporary:
        (temporary / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("mid-save")
    path = tmp_path / "status.json"
    for data in ("ä", b"new"):
        checkpoint.atomic_write(path, data)
    with pytest.raises(TypeError):
        checkpoint.atomic_write(path, None)
    assert checkpoint.problems(old, deep=True) == [] and path.read_bytes() == b"new"
    assert {*tmp_path.iterdir()} == {old, path}


def test_the_last_good_state_is_never_deleted_but_a_damaged_or_unguarded_one_is(tmp_path, monkeypatch):
    """It stays when it is alone, and beside states of another LoRA and damaged ones. Plain accelerate writes no guard
    file. What a kill leaves of a deleted state is no state."""
    good = make(tmp_path, 5)
    assert checkpoint.retire(good) is False
    other, damaged, plain = make(tmp_path, 10, name="other"), make(tmp_path, 10), tmp_path / "lora-step00000015-state"
    DAMAGE["truncated"](damaged)
    plain.mkdir()
    assert checkpoint.retire(good) is False and checkpoint.problems(good, deep=True) == []
    assert checkpoint.retire(damaged) and checkpoint.retire(plain)
    assert {*tmp_path.iterdir()} == {good, other}
    new = make(tmp_path, 20)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *a, **k: None)  # as if killed right after the renaming
        assert checkpoint.retire(good)
    assert {*checkpoint.states(tmp_path)} == {new, other} and len(list(tmp_path.iterdir())) == 3
    assert len(checkpoint.sweep(tmp_path)) == 1
    assert {*tmp_path.iterdir()} == {new, other}


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


def test_a_bad_state_is_set_aside_with_its_reason_where_there_is_room_and_no_longer_listed(tmp_path, monkeypatch):
    aside = [checkpoint.set_aside(make(tmp_path, 5), "its weights are truncated") for _ in range(2)]
    assert [p.name for p in aside] == ["lora-step00000005-state.bad", "lora-step00000005-state.bad-2"]
    assert (tmp_path / "lora-step00000005-state.bad.reason.txt").read_text() == "its weights are truncated\n"
    monkeypatch.setattr(Path, "write_bytes", failing(Path.write_bytes, errno.ENOSPC, ".reason.txt"))
    assert checkpoint.set_aside(make(tmp_path, 6), "bad").name == "lora-step00000006-state.bad"
    assert [*checkpoint.states(tmp_path)] == []


def test_a_sweep_removes_what_trainers_left_and_nothing_that_another_process_is_writing(tmp_path):
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


def test_a_lora_whose_name_ends_with_six_digits_has_its_last_state_and_what_is_left_of_it(tmp_path):
    """Such as a month. A file's name alone would make an epoch of them."""
    steps = {"anna-202411-state": 3, "anna-202411-000002-state": 2, "anna-202411-step00000001-state": 1}
    for name, step in {**steps, "anna-202412-state": 4}.items():
        with checkpoint.writing(tmp_path / name, step, epoch=1):
            pass
    assert {path.name: step for path, step in checkpoint.states(tmp_path, "anna-202411").items()} == steps
    (tmp_path / ".anna-202411-state.7.tmp").mkdir()
    assert [path.name for path in checkpoint.sweep(tmp_path, "anna-202411")] == [".anna-202411-state.7.tmp"]


def failing(real, number: int, *names: str):
    """`real`, which raises OSError(number) for paths whose text holds one of `names` (none: for all)."""

    def call(path, *args, **kwargs):
        if not names or any(name in str(path) for name in names):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **kwargs)

    return call


def test_a_state_that_vanishes_is_left_out_and_one_that_cannot_be_read_is_listed(tmp_path, monkeypatch):
    """The monitor lists them each second: a folder vanishes after it is listed. A folder that cannot be listed is an
    error: from "no state" follows a start at step 0."""
    kept, gone, real = make(tmp_path, 1), make(tmp_path, 9), os.stat

    def stat(path, *args, **kwargs):
        if str(path) == str(gone):
            shutil.rmtree(gone, ignore_errors=True)
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        assert [*checkpoint.states(tmp_path)] == [kept]
    gone = make(tmp_path, 9)

    def read_bytes(path):
        shutil.rmtree(gone, ignore_errors=True)
        return Path(path).read_bytes()

    with monkeypatch.context() as patch:  # it vanishes after its status was read
        patch.setattr(checkpoint, "read_bytes", read_bytes)
        assert [*checkpoint.states(tmp_path)] == [kept]
    unreadable = make(tmp_path, 10)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing(os.stat, errno.EIO, unreadable.name))
        assert [*checkpoint.states(tmp_path)] == [kept, unreadable]
    assert checkpoint.states(tmp_path / "missing") == {}
    monkeypatch.setattr(os, "listdir", failing(os.listdir, errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.states(tmp_path)


def test_a_state_on_a_disk_that_does_not_read_is_not_bad(tmp_path, monkeypatch):
    state = make(tmp_path, 10)
    for name in (checkpoint.GUARD, "model.safetensors"):
        with monkeypatch.context() as patch:
            patch.setattr("builtins.open", failing(open, errno.EIO, name))
            patch.setattr(io, "open", failing(io.open, errno.EIO, name))
            result = checkpoint.verify(state)
        assert result.problems == () and "cannot read it: Input/output error" in result.error
        assert not result.usable
    assert checkpoint.verify(state).usable


@pytest.mark.parametrize("replaced", [False, True])
def test_a_state_that_is_deleted_or_replaced_during_its_verification_is_not_bad(tmp_path, monkeypatch, replaced):
    state, real = make(tmp_path, 10, value=1.0), checkpoint._digest

    def change(path, kind):
        if path.name == "model.safetensors":
            shutil.rmtree(state)
            if replaced:
                make(tmp_path, 10, value=2.0)
        return real(path, kind)

    monkeypatch.setattr(checkpoint, "_digest", change)
    result = checkpoint.verify(state)
    assert result.problems == () and "replaced or deleted during the verification" in result.error


def test_the_command_tells_bad_from_cannot_verify(tmp_path):
    state = make(tmp_path, 10)
    assert command("verify", str(state), "--deep")[0] == 0
    code, answer, reasons = command("verify", str(tmp_path / "missing-state"))
    assert (code, answer["problems"], answer["usable"]) == (3, [], False)
    assert "no such folder" in answer["error"] and "no such folder" in reasons
    (state / checkpoint.GUARD).unlink()
    code, answer, _ = command("verify", str(state))
    assert code == 1 and "has no guard file" in answer["problems"][0]


def command(*words: object) -> tuple[int, dict, str]:
    done = call("guards.checkpoint", *words, "--json")
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def lora(path: Path, **tensors: np.ndarray) -> Path:
    save_file(tensors or {"a": np.ones((4, 4), np.float32), "b": np.ones(8, np.float16)}, path)
    return path


def test_a_complete_lora_verifies_and_each_shorter_or_longer_one_does_not(tmp_path):
    path = lora(tmp_path / "x.safetensors")
    data = path.read_bytes()
    assert checkpoint.verify_lora(path).usable
    assert command("verify-lora", str(path))[:2][0] == 0
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert len(checkpoint.verify_lora(path).problems) == 1, length
    path.write_bytes(data + b"x")
    assert "truncated or damaged" in checkpoint.verify_lora(path).problems[0]
    code, answer, reasons = command("verify-lora", str(path))
    assert (code, answer["usable"]) == (1, False) and answer["problems"][0] in reasons


def test_a_lora_that_is_missing_not_finite_or_not_one_is_bad_and_one_that_cannot_be_read_is_not(tmp_path, monkeypatch):
    assert "no such file" in checkpoint.verify_lora(tmp_path / "none.safetensors").problems[0]
    assert "no such file" in checkpoint.verify_lora(tmp_path).problems[0]
    nan = lora(tmp_path / "nan.safetensors", a=np.array([1, np.nan], np.float32))
    assert checkpoint.verify_lora(nan).problems == ("nan.safetensors: a holds NaN or infinity",)
    for header in (b"[]", b"{}", b'{"a": 1}', b'{"a": {"dtype": "F32", "data_offsets": [0, 1e999]}}', b"\xff"):
        (tmp_path / "odd.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        assert len(checkpoint.verify_lora(tmp_path / "odd.safetensors").problems) == 1, header
    path = lora(tmp_path / "x.safetensors")
    monkeypatch.setattr("builtins.open", failing(open, errno.EIO, "x.safetensors"))
    result = checkpoint.verify_lora(path)
    assert result.problems == () and "cannot read it" in result.error


def test_a_sweep_on_a_disk_that_went_read_only_removes_and_returns_nothing(tmp_path, monkeypatch):
    (tmp_path / ".lora-state.7.gone").mkdir()
    (tmp_path / ".lora-state.7.gone" / "part").touch()
    (tmp_path / ".lora.safetensors.7.tmp").touch()
    nameless = make(tmp_path, 10)
    os.replace(nameless, tmp_path / ".lora-step00000010-state.7.old")
    with monkeypatch.context() as patch:
        for name in ("replace", "unlink", "rmdir"):
            patch.setattr(os, name, failing(getattr(os, name), errno.EROFS))
        patch.setattr(Path, "unlink", failing(Path.unlink, errno.EROFS))
        assert checkpoint.sweep(tmp_path) == []
        assert len(list(tmp_path.iterdir())) == 3
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", failing(os.listdir, errno.EROFS))
        assert checkpoint.sweep(tmp_path) == []
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", failing(open, errno.EIO, "model.safetensors"))
        assert len(checkpoint.sweep(tmp_path)) == 2, "the only copy of a state that it cannot read is kept"
    assert len(checkpoint.sweep(tmp_path)) == 1
    assert [*checkpoint.states(tmp_path)] == [nameless]


def test_where_nothing_can_be_renamed_or_read_retire_and_set_aside_raise_and_the_state_stays(tmp_path, monkeypatch):
    old, new = make(tmp_path, 5), make(tmp_path, 10)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr(io, "open", failing(io.open, errno.EIO, checkpoint.GUARD))
        checkpoint.retire(old)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        patch.setattr(os, "replace", Mock(side_effect=[PermissionError, PermissionError, None]))
        checkpoint.rename(old, new, sync=False)  # another program had it open for a moment
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing(os.replace, errno.EROFS))
        for action in (checkpoint.retire, lambda state: checkpoint.set_aside(state, "bad")):
            with pytest.raises(OSError, match=re.escape(os.strerror(errno.EROFS))):
                action(old)
    assert [*checkpoint.states(tmp_path)] == [new, old] and checkpoint.verify(old).usable
    shutil.rmtree(old)
    assert checkpoint.retire(old) is True  # another process deleted it
    with pytest.raises(FileNotFoundError):
        checkpoint.set_aside(old, "bad")
