"""Resume is exact: a run that is killed, whenever, ends with the bytes of one that was not."""

import json
import random
import shutil

import pytest
from trainer_helpers import flags, fork, good, images, make_config, make_images, sha, train

from guards import checkpoint
from guards.heartbeat import Heartbeat
from trainer import loop, setup, states, tiny_flux
from trainer.arguments import parse
from trainer.errors import TrainError

COMMON = {
    "max_train_steps": 20,
    "save_every_n_steps": 3,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 4,
    "network_dropout": 0.1,
    "optimizer_type": "adamw8bit",
    "optimizer_args": ["min_8bit_size=16"],  # the tiny LoRA's matrices are smaller than what it leaves in 32 bits
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    (folder / "prompts.txt").write_text("a thing --w 64 --h 64 --s 2\nanother --w 64 --h 64 --s 2\n", encoding="utf-8")
    return {
        "folder": folder,
        "model": tiny_flux.ensure(folder / "models" / "tiny-flux"),
        "config": make_config(folder / "dataset.toml", make_images(folder / "images")),
        "samples": {"sample_prompts": folder / "prompts.txt", "sample_every_n_steps": 6},
    }


@pytest.fixture(scope="module")
def undisturbed(work):
    """An undisturbed run with samples; its folder."""
    folder, done = run(work, "undisturbed", **COMMON, **work["samples"])
    good(done)
    return folder


def arguments(work, name, resume=None, **changed):
    return flags(work["model"], work["config"], work["folder"] / name, save_state=True, resume=resume, **changed)


def run(work, name, fault="", resume=None, start=fork, **changed):
    beats = work["folder"] / f"beats-{name}"
    inject = {"HANGPROOF_INJECT": "trainer_helpers:fault", "TEST_FAULT": fault, "HANGPROOF_HEARTBEAT": str(beats)}
    return work["folder"] / name, start(arguments(work, name, resume, **changed), **(inject if fault else {}))


def tensors(lora):
    """The numbers of a LoRA without its header, which also has the number of steps."""
    data = lora.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def newest(folder):
    return checkpoint.newest_valid(folder, deep=True)


def test_kills_mid_save_included_change_no_bit_of_the_lora(work, undisturbed):
    """The killed run makes no samples, the undisturbed one does: they draw from numbers of their own."""
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    print(f"moments drawn with seed {seed}")
    faults = [
        f"save@{5 + draw.randrange(2)}+{3 + draw.randrange(4)}",  # in the state: its files, its guard, before the rename
        f"kill@{8 + draw.randrange(4)}+{draw.random() * 0.02:.4f}",
        f"save@{14 + draw.randrange(2)}+{1 + draw.randrange(2)}",  # in the LoRA file, or between it and the state
    ]
    print(faults)
    reached = []
    for number, fault in enumerate(faults):
        resume = newest(work["folder"] / "killed") if number else None
        killed, done = run(work, "killed", fault, resume, **COMMON, max_data_loader_n_workers=2 * (number % 2))
        assert done.returncode == -9, done.stderr[-2000:]
        reached.append(resume and checkpoint.guard_of(resume)["step"])
    assert len(set(reached)) == 3, "the attempts made no progress, so nothing was tested"
    good(run(work, "killed", resume=newest(killed), start=train, **COMMON)[1])
    assert sha(killed / "tiny.safetensors") == sha(undisturbed / "tiny.safetensors")
    assert sha(killed / "tiny-state" / "model.safetensors") == sha(undisturbed / "tiny-state" / "model.safetensors")
    assert not [p.name for p in killed.iterdir() if p.name.startswith(".") and "cache" not in p.name]


def test_a_kill_at_whichever_write_of_a_save_leaves_a_state_that_is_valid_and_correct(work):
    """At each fsync in turn: the LoRA, its folder, the three files of the state, its guard, the state's folder, the output."""
    common = {"max_train_steps": 6, "save_every_n_steps": 3, "optimizer_type": "adamw"}
    undisturbed, done = run(work, "saved", **common)
    good(done)
    found = []
    for number in range(1, 9):
        folder, done = run(work, f"saved-{number}", f"save@6+{number}", **common)
        assert done.returncode == -9, done.stderr[-2000:]
        state = newest(folder)
        found.append(checkpoint.guard_of(state)["step"])
        for file in ("model.safetensors", "optimizer.bin", "train_state.json"):
            assert sha(state / file) == sha(undisturbed / state.name / file), f"killed at fsync {number}"
    assert found == [3] * 7 + [6], "the last write comes after the rename that makes the state count"


def test_a_stop_and_a_kill_among_samples_lose_neither_a_lora_nor_an_image(work, undisturbed):
    """Stopped at step 6, which saves and samples; killed in the samples of step 12; asked to stop at the last step."""
    folder, done = run(work, "stopped", "stop@6", **COMMON, **work["samples"])
    assert done.returncode == 3, done.stderr[-2000:]
    state = newest(folder)
    assert checkpoint.guard_of(state)["step"] == 6
    assert f"stopped on request at step 6; its state is {state}" in done.stdout
    assert sorted(p.name for p in folder.glob("*.safetensors")) == [f"tiny-step0000000{n}.safetensors" for n in (3, 6)]
    assert list(images(folder)) == ["tiny_000006_00_42.png", "tiny_000006_01_43.png"]

    done = run(work, "stopped", "sample@12", state, **COMMON, **work["samples"])[1]
    assert done.returncode == -9, done.stderr[-2000:]
    state = newest(folder)
    assert checkpoint.guard_of(state)["step"] == 12
    assert len(images(folder)) == 2

    good(run(work, "stopped", "stop@20", state, **COMMON, **work["samples"])[1])
    assert images(folder) == images(undisturbed)
    assert len(images(undisturbed)) == 2 * (20 // 6)
    loras = [sorted(p.name for p in f.glob("*.safetensors")) for f in (folder, undisturbed)]
    assert loras[0] == loras[1] and len(loras[1]) == 20 // 3 + 1
    assert [sha(folder / name) for name in loras[0]] == [sha(undisturbed / name) for name in loras[0]]


def test_a_stop_while_samples_are_made_saves_its_state_before_they_are_done(work, undisturbed):
    """Step 6 saves nothing here. Whoever asked does not wait: killed at the denoising step after the request."""
    unsaved = {**COMMON, "save_every_n_steps": 100}
    folder, done = run(work, "hasty", "hasty@6", **unsaved, **work["samples"])
    assert done.returncode == -9, done.stderr[-2000:]
    state = newest(folder)
    assert state.name == "tiny-step00000006-state"
    assert sha(state / "model.safetensors") == sha(undisturbed / state.name / "model.safetensors")
    good(run(work, "hasty", resume=state, **unsaved, **work["samples"])[1])
    assert images(folder) == images(undisturbed)
    assert sha(folder / "tiny.safetensors") == sha(undisturbed / "tiny.safetensors")


@pytest.mark.journey
def test_accumulation_and_workers_resume_in_the_middle_of_an_epoch(work):
    """10 batches an epoch, 3 a step: the fourth step of each epoch has one. Killed in it, resumed with workers."""
    common = {"max_train_epochs": 2, "gradient_accumulation_steps": 3, "optimizer_type": "adafactor"}
    common["optimizer_args"] = ["relative_step=False", "scale_parameter=False", "warmup_init=False"]
    undisturbed, done = run(work, "accumulated", **common)
    good(done)
    killed, done = run(work, "accumulated-killed", "kill@6+0.01", save_every_n_steps=1, **common)
    assert done.returncode == -9
    state = newest(killed)
    assert checkpoint.guard_of(state)["step"] in (5, 6, 7)
    workers = {"max_data_loader_n_workers": 2, "persistent_data_loader_workers": True}
    done = good(run(work, "accumulated-killed", resume=state, save_every_n_steps=1, **common, **workers)[1])
    assert "epoch 2/2" in done.stdout and "epoch 1/2" not in done.stdout
    assert sha(killed / "tiny.safetensors") == sha(undisturbed / "tiny.safetensors")


def test_old_states_go_by_the_flags_but_never_the_last_good_one(tmp_path):
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


REFUSED = {
    "cut": ({}, "model.safetensors: truncated: .*; resume from another state"),
    "missing guard": ({}, "has no guard file"),
    "of sd-scripts": ({}, "not a state of the built-in trainer"),
    "no folder": ({}, "the folder does not exist"),
    "another rank": ({"network_dim": 8}, "network_dim is 4 in the state and 8 in this run"),
    "other blocks": (
        {"network_args": ["train_blocks=double"]},
        "train_blocks is all in the state and double in this run",
    ),
    "another optimizer": (
        {"optimizer_type": "adamw", "optimizer_args": None},
        "optimizer_type is adamw8bit in the state",
    ),
    "another model": ({}, "model is [0-9a-f]+ in the state and 0123 in this run"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_state_of_another_run_or_a_damaged_one_is_refused_with_the_reason(work, undisturbed, what, monkeypatch):
    changed, expected = REFUSED[what]
    state = work["folder"] / f"{what}-state"
    shutil.copytree(undisturbed / "tiny-state", state)
    guard = state / checkpoint.GUARD
    if what == "cut":
        weights = state / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "missing guard":
        guard.unlink()
    elif what == "of sd-scripts":
        guard.write_text(json.dumps({**json.loads(guard.read_text()), "belongs": None}), encoding="utf-8")
    elif what == "no folder":
        shutil.rmtree(state)
    elif what == "another model":
        monkeypatch.setattr(setup.models, "fingerprint", lambda folder, *parts: "0123")
    args = parse(arguments(work, f"refused {what}", state, **{**COMMON, **changed}))
    with pytest.raises(TrainError, match=f"--resume {state}.*{expected}"):
        loop.restore(setup.build(args, Heartbeat(None)))


def test_a_run_that_is_asked_for_fewer_steps_than_it_has_keeps_its_lora(work, undisturbed):
    folder, done = run(work, "fewer", resume=undisturbed / "tiny-state", **{**COMMON, "max_train_steps": 10})
    good(done)
    assert tensors(folder / "tiny.safetensors") == tensors(undisturbed / "tiny.safetensors")


def test_a_resume_with_other_images_is_allowed_and_reported(work, undisturbed, capsys):
    config = make_config(work["folder"] / "other.toml", work["folder"] / "images", repeats=3)
    args = parse(flags(work["model"], config, work["folder"] / "other", resume=undisturbed / "tiny-state", **COMMON))
    assert loop.restore(setup.build(args, Heartbeat(None)))[0] == 20
    assert "resume: data changed from " in capsys.readouterr().out
