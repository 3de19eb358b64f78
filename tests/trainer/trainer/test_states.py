"""Resume is exact: a run that is killed, whenever, ends with the bytes of one that was not.

Kills in a save: tests/trainer/monitor/resume/test_snapshots.py. Accumulation and workers: tests/campaigns/test_epoch_ends.py.
"""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from trainer_helpers import flags, good, images, make_config, numbers, sha, train, trained

from guards import checkpoint
from guards.heartbeat import Heartbeat
from guards.snapshot_files import File
from trainer import loop, optimizers, setup, states
from trainer.arguments import parse
from trainer.errors import TrainError

COMMON = {"max_train_steps": 20, "save_every_n_steps": 3, "network_dropout": 0.1}
COMMON |= {"lr_scheduler": "cosine", "lr_warmup_steps": 4, "optimizer_type": "adamw8bit"}
COMMON["optimizer_args"] = ["min_8bit_size=16"]  # the tiny LoRA's matrices are smaller than what it leaves in 32 bits


@pytest.fixture(scope="module")
def samples(work):
    """The flags of a run that makes two sample images each sixth step."""
    prompts = work["folder"] / "prompts.txt"
    prompts.write_text("a thing --w 64 --h 64 --s 2\nanother --w 64 --h 64 --s 2\n", encoding="utf-8")
    return {"sample_prompts": prompts, "sample_every_n_steps": 6}


@pytest.fixture(scope="module")
def undisturbed(work, samples):
    """An undisturbed run with samples; its folder."""
    return trained(work, "undisturbed", **COMMON, **samples)


def newest(folder):
    return checkpoint.newest_valid(folder, deep=True)


def test_a_kill_at_whichever_write_of_a_save_leaves_a_state_that_is_valid_and_correct(work):
    """At each fsync in turn: the LoRA, its folder, the state's three files, its guard, its folder, the output."""
    common = {"max_train_steps": 2, "save_every_n_steps": 1, "optimizer_type": "adamw"}
    undisturbed = trained(work, "saved", **common)
    found = []
    for number in range(1, 9):
        folder, done = train(work, f"saved-{number}", f"save@2+{number}", **common)
        assert done.returncode == -9, done.stderr[-2000:]
        state = newest(folder)
        found.append(checkpoint.guard_of(state)["step"])
        for file in ("model.safetensors", "optimizer.bin", "train_state.json"):
            assert sha(state / file) == sha(undisturbed / state.name / file), f"killed at fsync {number}"
    assert found == [1] * 7 + [2], "the last write comes after the rename that makes the state count"


@pytest.mark.journey
def test_a_stop_and_a_kill_among_samples_lose_neither_a_lora_nor_an_image(work, undisturbed, samples):
    """Stopped at step 6, which saves and samples; killed in the samples of step 12; asked to stop at the last step."""
    folder, done = train(work, "stopped", "stop@6", **COMMON, **samples)
    assert done.returncode == 3, done.stderr[-2000:]
    state = newest(folder)
    assert checkpoint.guard_of(state)["step"] == 6
    assert f"stopped on request at step 6; its state is {state}" in done.stdout
    assert list(images(folder)) == ["tiny_000006_00_42.png", "tiny_000006_01_43.png"]
    done = train(work, "stopped", "sample@12", resume=state, **COMMON, **samples)[1]
    assert done.returncode == -9, done.stderr[-2000:]
    state = newest(folder)
    assert checkpoint.guard_of(state)["step"] == 12
    assert len(images(folder)) == 2
    good(train(work, "stopped", "stop@20", resume=state, **COMMON, **samples)[1])
    assert images(folder) == images(undisturbed)
    assert len(images(undisturbed)) == 2 * (20 // 6)
    loras = [{path.name: sha(path) for path in one.glob("*.safetensors")} for one in (folder, undisturbed)]
    assert loras[0] == loras[1] and len(loras[1]) == 20 // 3 + 1


def test_a_stop_while_samples_are_made_saves_its_state_before_they_are_done(work, undisturbed, samples):
    """Step 6 saves nothing here. Whoever asked does not wait: killed at the denoising step after the request."""
    unsaved = {**COMMON, "save_every_n_steps": 100}
    folder, done = train(work, "hasty", "hasty@6", **unsaved, **samples)
    assert done.returncode == -9, done.stderr[-2000:]
    state = newest(folder)
    assert state.name == "tiny-step00000006-state"
    assert sha(state / "model.safetensors") == sha(undisturbed / state.name / "model.safetensors")
    good(train(work, "hasty", resume=state, **unsaved, **samples)[1])
    assert images(folder) == images(undisturbed)
    assert sha(folder / "tiny.safetensors") == sha(undisturbed / "tiny.safetensors")


def test_a_kill_in_the_last_samples_costs_no_lora_and_a_longer_run_draws_none_of_them_again(work, samples):
    common = {**COMMON, **samples, "max_train_steps": 6, "save_every_n_steps": 100}
    folder, done = train(work, "last", "sample@6", **common)
    assert done.returncode == -9 and (folder / "tiny.safetensors").is_file()
    for steps in (6, 8):
        done = good(train(work, "last", resume=folder / "tiny-state", **common | {"max_train_steps": steps})[1])
        assert len(images(folder)) == 2 and ("the run has 8 steps instead of 6" in done.stdout) == (steps == 8)


@pytest.mark.journey
def test_accumulation_and_workers_resume_in_the_middle_of_an_epoch(work):
    """10 batches an epoch, 3 a step: the fourth step of each epoch has one. Killed in it, resumed with workers."""
    common = {"max_train_epochs": 2, "gradient_accumulation_steps": 3, "optimizer_type": "adafactor"}
    common["optimizer_args"] = ["relative_step=False", "scale_parameter=False", "warmup_init=False"]
    undisturbed = trained(work, "accumulated", **common)
    killed, done = train(work, "accumulated-killed", "kill@6+0.01", save_every_n_steps=1, **common)
    assert done.returncode == -9
    state = newest(killed)
    assert checkpoint.guard_of(state)["step"] in (5, 6, 7)
    workers = {"max_data_loader_n_workers": 2, "persistent_data_loader_workers": True}
    done = good(train(work, "accumulated-killed", resume=state, save_every_n_steps=1, **common, **workers)[1])
    assert "epoch 2/2" in done.stdout and "epoch 1/2" not in done.stdout
    assert sha(killed / "tiny.safetensors") == sha(undisturbed / "tiny.safetensors")


def test_old_states_go_by_the_flags_but_never_the_last_good_one(tmp_path, monkeypatch):
    messages: list[str] = []
    for step in (3, 6, 9):
        with checkpoint.writing(tmp_path / f"tiny-step{step:08d}-state", step, 0) as folder:
            (folder / "model.safetensors").write_bytes(bytes(100))
        (tmp_path / f"tiny-step{step:08d}.safetensors").write_bytes(b"")
    (tmp_path / "tiny-step00000003-state.bad").mkdir()
    (tmp_path / "tinyer-step00000003.safetensors").write_bytes(b"")

    def left():
        return sorted(p.name.removeprefix("tiny-step0000000") for p in tmp_path.iterdir())

    states.drop_old(tmp_path, "tiny", "step", 3, True, messages.append)
    states.drop_old(tmp_path, "tiny", "step", 6, False, messages.append)
    assert left() == ["3-state.bad", "6-state", "9-state", "9.safetensors", "tinyer-step00000003.safetensors"]
    (tmp_path / "tiny-step00000009-state" / "model.safetensors").write_bytes(bytes(99))
    states.drop_old(tmp_path, "tiny", "step", 6, True, messages.append)
    assert "6-state" in left()
    assert len(messages) == 1 and "tiny-step00000006-state is kept, because no other state is valid" in messages[0]
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=PermissionError(13, "Permission denied")))
    states.drop_old(tmp_path, "tiny", "step", 9, False, messages.append)  # on Windows, a program has it open
    assert messages[1].endswith("tiny-step00000009.safetensors was not deleted (Permission denied); delete it by hand")


# what is done to a state, the flags that change → the message
REFUSED = [
    (lambda at: os.truncate(at / "model.safetensors", 100), {}, "model.safetensors: truncated: .*; resume from an"),
    (lambda at: (at / checkpoint.GUARD).unlink(), {}, "has no guard file"),
    (lambda at: of_sd_scripts(at / checkpoint.GUARD), {}, "not a state of the built-in trainer"),
    (shutil.rmtree, {}, "the folder does not exist"),
    (None, {"network_dim": 8}, "network_dim is 4 in the state and 8 in this run"),
    (None, {"network_args": ["train_blocks=double"]}, "train_blocks is all in the state and double in this run"),
    (None, {"optimizer_type": "adamw", "optimizer_args": None}, "optimizer_type is adamw8bit in the state"),
    ("another model", {}, "model is [0-9a-f]+ in the state and 0123 in this run"),
]


def of_sd_scripts(guard):
    guard.write_text(json.dumps({**json.loads(guard.read_text()), "belongs": None}), encoding="utf-8")


@pytest.mark.parametrize(("damage", "changed", "expected"), REFUSED)
def test_a_foreign_or_a_damaged_state_is_refused(work, undisturbed, damage, changed, expected, tmp_path, monkeypatch):
    state = tmp_path / "tiny-state"
    shutil.copytree(undisturbed / "tiny-state", state)
    if callable(damage):
        damage(state)
    elif damage:
        monkeypatch.setattr(setup.models, "fingerprint", lambda folder, *parts: "0123")
    args = parse(flags(work["model"], work["config"], work["folder"] / "refused", resume=state, **COMMON | changed))
    with pytest.raises(TrainError, match=f"--resume {state}.*{expected}"):
        loop.restore(setup.build(args, Heartbeat(None)))


def test_a_run_that_is_asked_for_fewer_steps_than_it_has_keeps_its_lora(work, undisturbed):
    folder, done = train(work, "fewer", resume=undisturbed / "tiny-state", **{**COMMON, "max_train_steps": 10})
    assert "resume: the state is of step 20 and the run has 10 steps, so nothing is trained" in good(done).stdout
    ends = [numbers(one / "tiny.safetensors") for one in (folder, undisturbed)]
    assert ends[0] == ends[1]


def test_a_run_that_goes_on_with_smaller_batches_trains_the_steps_that_were_planned(work):
    """Of three buckets none fills its last batch of four, so that an epoch of four steps becomes one of three."""
    images = work["folder"] / "images"
    four, one = (make_config(work["folder"] / f"{size}.toml", images, batch_size=size) for size in (4, 1))
    settings = {"max_train_steps": None, "max_train_epochs": 3, "save_every_n_steps": 5}
    fours = trained(work, "fours", config=four, **settings)
    for start in (fours / "tiny-step00000005-state", work["folder"] / "ones/tiny-step00000010-state"):
        ones = trained(work, "ones", config=one, gradient_accumulation_steps=4, resume=start, **settings)
        assert checkpoint.guard_of(ones / "tiny-state")["step"] == 12


def test_a_resume_with_other_images_is_allowed_and_reported_and_obeys_other_options_of_the_optimizer(
    work, undisturbed, capsys
):
    config = make_config(work["folder"] / "other.toml", work["folder"] / "images", repeats=3)
    more = {**COMMON, "optimizer_args": [*COMMON["optimizer_args"], "weight_decay=0.5"]}
    args = parse(flags(work["model"], config, work["folder"] / "other", resume=undisturbed / "tiny-state", **more))
    training = setup.build(args, Heartbeat(None))
    assert loop.restore(training)[0] == 20
    assert "resume: data changed from " in capsys.readouterr().out
    assert {group["weight_decay"] for group in training.optimizer.param_groups} == {0.5}


OBEYED = ""
# optimizer, its options in the state, those after the resume, how they differ
OPTIONS = [
    ("adamw", {}, {"amsgrad": "True"}, "amsgrad is False in the state and True in this run"),
    ("adafactor", {}, {"beta1": "0.9"}, "beta1 is None in the state and 0.9 in this run"),
    ("prodigy", {}, {"slice_p": "3"}, "slice_p is 1 in the state and 3 in this run"),
    ("adamwschedulefree", {}, {"betas": "(0.8, 0.9)"}, r"betas is \(0.9, 0.999\) in the state and .*"),
    ("adafactor", {}, {"relative_step": "False"}, OBEYED),
    ("adafactor", {"relative_step": "False"}, {"relative_step": "True"}, OBEYED),
    ("adamwschedulefree", {}, {"warmup_steps": "3"}, OBEYED),
]


@pytest.mark.parametrize(("kind", "before", "now", "message"), OPTIONS)
def test_other_options_of_an_optimizer_are_obeyed_or_refused(kind, before, now, message, tmp_path):
    def training(options):
        weight = torch.nn.Parameter(torch.ones(8, 8))
        weight.grad = torch.ones(8, 8)
        optimizer = optimizers.build(kind, options, 1e-3, [weight])
        args, accelerator = SimpleNamespace(optimizer_type=kind), SimpleNamespace(scaler=None)
        more = {"parameters": {"x": weight}, "average": {}, "log": print}
        belongs = dict.fromkeys((*states.MUST_MATCH, *states.SHOULD_MATCH))
        return SimpleNamespace(args=args, accelerator=accelerator, optimizer=optimizer, belongs=belongs, **more)

    first, second, fresh = training(before), training(now), training(now)
    first.optimizer.step()
    contents = {"torch": first.optimizer.state_dict(), "safetensors": first.parameters, "raw": b"{}"}
    names = ("optimizer.bin", "model.safetensors", "train_state.json")
    files = [File(name, kind, content) for name, (kind, content) in zip(names, contents.items(), strict=True)]
    states.save(tmp_path / "x-state", files, step=1, epoch=0, belongs=first.belongs)
    if message:
        with pytest.raises(TrainError, match=f"x-state: --optimizer_args {message}; use the same value, or start"):
            states.load(tmp_path / "x-state", second)
        return
    states.load(tmp_path / "x-state", second)
    second.optimizer.step()
    assert [second.optimizer.param_groups[0][key] for key in ("lr", *now)] == [
        fresh.optimizer.param_groups[0][key] for key in ("lr", *now)
    ]
