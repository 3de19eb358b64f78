"""Resume is exact: a run that is killed, whenever, ends with the bytes of one that was not."""

import random

import pytest
from trainer_helpers import flags, good, make_config, make_images, sha, train

from guards import checkpoint
from trainer import tiny_flux


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    images = make_images(folder / "images")
    return {
        "folder": folder,
        "model": tiny_flux.ensure(folder / "models" / "tiny-flux"),
        "config": make_config(folder / "dataset.toml", images),
    }


def run(work, name, fault="", resume=None, **changed):
    output = work["folder"] / name
    argv = flags(work["model"], work["config"], output, save_state=True, resume=resume, **changed)
    extra = {"HANGPROOF_INJECT": "trainer_helpers:fault", "TEST_FAULT": fault} if fault else {}
    return output, train(argv, **extra)


def test_five_kills_mid_save_included_change_no_bit_of_the_lora(work):
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    print(f"moments drawn with seed {seed}")
    common = {"max_train_steps": 38, "save_every_n_steps": 3, "lr_scheduler": "cosine", "lr_warmup_steps": 4}
    whole, done = run(work, "whole", **common)
    good(done)
    faults = [
        f"kill@{4 + draw.randrange(3)}+{draw.random() * 0.02:.4f}",
        f"save@{8 + draw.randrange(2)}+{3 + draw.randrange(4)}",  # in the state: its files, its guard, before the rename
        f"kill@{13 + draw.randrange(4)}+{draw.random() * 0.02:.4f}",
        f"save@{19 + draw.randrange(2)}+{1 + draw.randrange(2)}",  # in the LoRA file, or between it and the state
        f"kill@{25 + draw.randrange(4)}+{draw.random() * 0.02:.4f}",
    ]
    print(faults)
    reached = []
    for number, fault in enumerate(faults):
        resume = checkpoint.newest_valid(work["folder"] / "killed", deep=True) if number else None
        killed, done = run(work, "killed", fault, resume, max_data_loader_n_workers=2 * (number % 2), **common)
        assert done.returncode == -9, done.stderr[-2000:]
        reached.append(resume and checkpoint.guard_of(resume)["step"])
    assert len(set(reached)) > 2, "the attempts made no progress, so nothing was tested"
    good(run(work, "killed", resume=checkpoint.newest_valid(killed, deep=True), **common)[1])
    assert sha(killed / "tiny.safetensors") == sha(whole / "tiny.safetensors")
    assert sha(killed / "tiny-state" / "model.safetensors") == sha(whole / "tiny-state" / "model.safetensors")
    assert not [p.name for p in killed.iterdir() if p.name.startswith(".") and "cache" not in p.name]


def test_accumulation_and_workers_resume_in_the_middle_of_an_epoch(work):
    """10 batches an epoch, 3 a step: the fourth step of each epoch has one. Killed in it, resumed with workers."""
    common = {"max_train_epochs": 2, "gradient_accumulation_steps": 3, "optimizer_type": "adafactor"}
    common["optimizer_args"] = ["relative_step=False", "scale_parameter=False", "warmup_init=False"]
    whole, done = run(work, "accumulated", **common)
    good(done)
    killed, done = run(work, "accumulated-killed", "kill@6+0.01", save_every_n_steps=1, **common)
    assert done.returncode == -9
    state = checkpoint.newest_valid(killed, deep=True)
    assert checkpoint.guard_of(state)["step"] in (5, 6, 7)
    workers = {"max_data_loader_n_workers": 2, "persistent_data_loader_workers": True}
    done = good(run(work, "accumulated-killed", resume=state, save_every_n_steps=1, **common, **workers)[1])
    assert "epoch 2/2" in done.stdout and "epoch 1/2" not in done.stdout
    assert sha(killed / "tiny.safetensors") == sha(whole / "tiny.safetensors")


def test_a_stop_request_saves_its_step_and_a_resume_goes_on_from_there(work, tmp_path):
    common = {"max_train_steps": 12, "optimizer_type": "adamw8bit"}
    whole, done = run(work, "unstopped", **common)
    good(done)
    output = work["folder"] / "stopped"
    argv = flags(work["model"], work["config"], output, **common)
    inject = {"HANGPROOF_INJECT": "trainer_helpers:fault", "TEST_FAULT": "stop@5", "HANGPROOF_HEARTBEAT": str(tmp_path)}
    done = train(argv, **inject)
    assert done.returncode == 3, done.stderr[-2000:]
    state = checkpoint.newest_valid(output)
    assert checkpoint.guard_of(state)["step"] == 6  # the step under way when the stop was asked for
    assert not (output / "tiny.safetensors").exists()
    good(run(work, "stopped", resume=state, **common)[1])
    assert sha(output / "tiny.safetensors") == sha(whole / "tiny.safetensors")


@pytest.mark.parametrize("damage", ["cut", "missing guard", "another rank"])
def test_a_bad_state_is_refused_with_what_is_wrong(work, damage):
    source = work["folder"] / "good"
    if not source.exists():
        good(run(work, "good", max_train_steps=2)[1])
    import shutil

    state = work["folder"] / f"{damage}-state"
    shutil.copytree(source / "tiny-state", state)
    changed, expected = {}, ""
    if damage == "cut":
        weights = state / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        expected = "model.safetensors: "
    elif damage == "missing guard":
        (state / "hangproof.json").unlink()
        expected = "no readable guard file"
    else:
        changed, expected = {"network_dim": 8}, "its network_dim is 4, this run's is 8"
    output, done = run(work, f"refused {damage}", resume=state, max_train_steps=4, **changed)
    assert done.returncode == 1
    assert expected in done.stderr and "Traceback" not in done.stderr
    assert not (output / "tiny.safetensors").exists()
