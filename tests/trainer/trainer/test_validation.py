"""Held-out images: never trained on, their loss at fixed noise, and a training that is the same without them."""

import math
import shutil
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st
from trainer_helpers import flags, good, make_config, metrics, numbers, train, trained

import runs
from guards.heartbeat import REQUEST_STOP
from presets.steps import held_out
from runs import command
from trainer import loop, validation
from trainer.arguments import parse
from trainer.dataset import Image, read
from trainer.errors import TrainError

SETTINGS = {"max_train_steps": 9, "save_every_n_steps": 3, "network_dropout": 0.1}
HELD = {"validation_split": 0.2, "validation_seed": 7, "validate_every_n_steps": 2}


def image(name: str, folder: str = "a", dataset: int = 0) -> Image:
    return Image(Path(folder, name), "", 1, (64, 64), (64, 64), dataset, 1)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), min_size=2, unique=True),
    st.floats(0.01, 0.5),
    st.integers(0, 99),
)
def test_no_image_is_trained_on_and_held_out(names, share, seed):
    images = [image(f"{number}.png", folder, dataset) for folder, number in names for dataset in (0, 1)]
    kept, held = validation.split(images, share, seed)
    assert not {one.path for one in kept} & {one.path for one in held} and held and kept
    assert sorted([*kept, *held], key=str) == sorted(images, key=str)
    assert [one for one in images if one in kept] == kept  # in their order
    counts = {folder: sum(1 for f, _ in names if f == folder) for folder in "abc"}
    assert sum(held_out(counts, share, "diffusers").values()) == len({one.path for one in held})  # what the plan says


def test_the_same_seed_holds_out_the_same_images_wherever_they_are():
    images = [image(f"{n}.png") for n in range(20)]
    names = lambda found: [one.path.name for one in found]  # noqa: E731
    held = names(validation.split(images, 0.2, 3)[1])
    moved = [image(f"{n}.png", "elsewhere") for n in range(20)]
    assert len(held) == 4 and names(validation.split(moved, 0.2, 3)[1]) == held
    assert names(validation.split(images, 0.2, 4)[1]) != held
    assert validation.split(images, 0.0, 3) == (images, [])
    with pytest.raises(TrainError, match="no image is left to train on; add images"):
        validation.split([image("a.png")], 0.3, 0)


def values(work, name) -> dict[int, float]:
    """The validation losses in the metrics of a run; of a repeated step the last one."""
    return {one["step"]: one["val_loss"] for one in metrics(work["folder"] / name, "validation")}


@pytest.fixture(scope="module")
def held_out_run(work):
    folder, done = train(work, "held", **SETTINGS, **HELD)
    good(done)
    assert "held out for validation: 1 of 5 images" in done.stdout
    return folder


def test_the_losses_are_measured_before_at_each_interval_and_at_the_end(work, held_out_run):
    found = values(work, "held")
    assert list(found) == [0, 2, 4, 6, 8, 9]
    assert all(math.isfinite(value) and value > 0 for value in found.values())
    assert len(set(found.values())) == 6  # the weights change


def test_the_noise_is_the_same_each_time(work):
    good(train(work, "still", learning_rate=1e-30, **SETTINGS, **HELD)[1])  # the weights stay: only noise could differ
    assert len(set(values(work, "still").values())) == 1


def test_training_is_the_same_to_the_bit_as_without_the_held_out_image(work, held_out_run):
    args = parse(flags(work["model"], work["config"], work["folder"] / "x", **HELD))
    (held,) = validation.split(read(work["config"], args), 0.2, 7)[1]
    images = work["folder"] / "fewer"
    shutil.copytree(work["images"], images, ignore=shutil.ignore_patterns(".*"))
    for path in (images / held.path.name, (images / held.path.name).with_suffix(".txt")):
        path.unlink()
    folder = trained(work, "fewer", config=make_config(work["folder"] / "fewer.toml", images), **SETTINGS)
    for name in ("tiny-step00000006.safetensors", "tiny.safetensors"):
        assert numbers(folder / name) == numbers(held_out_run / name), name


def test_a_stop_ends_a_validation_and_the_resumed_run_measures_again(work, held_out_run):
    """But not the last one: the run is done then."""
    common = {**SETTINGS, **HELD, "validate_every_n_steps": 4}
    train(work, "stopped", "stop@4", **common)
    state = work["folder"] / "stopped/tiny-step00000004-state"
    _, done = train(work, "stopped", "validate@0", resume=state, **common)
    assert f"stopped on request at step 4; its state is {state}" in done.stdout
    assert list(values(work, "stopped")) == [0]
    good(train(work, "stopped", resume=state, **common)[1])
    held = values(work, "held")
    assert values(work, "stopped") == {step: held[step] for step in (0, 4, 8, 9)}
    good(train(work, "stopped-late", "stop@9", **SETTINGS | HELD)[1])
    assert values(work, "stopped-late") == held


def test_several_processes_measure_to_the_end_at_a_stop_which_comes_with_their_next_step(monkeypatch):
    """The state of this step is saved at once: the validation may outlast the stop."""
    monkeypatch.setattr(loop, "using_final_weights", nullcontext)
    monkeypatch.setattr(loop, "keep_state", keep_state := Mock())
    t, metrics = Mock(hb=Mock(request=REQUEST_STOP), state=None, per_epoch=3, total=9), Mock()
    t.accelerator = Mock(num_processes=2, trackers=[])
    t.validator.loss = lambda model, beat, autocast, stop: None if stop() else 0.5
    assert loop.validate_if_due(t, 4, deque(), metrics)
    metrics.validation.assert_called_once_with(4, 2, 0.5, t.validator.items)
    keep_state.assert_called_once()


@pytest.mark.parametrize(
    ("backend", "every"), [("diffusers", {}), ("sd-scripts", {"validate_every_n_epochs": command.NEVER})]
)
def test_the_spec_gives_each_trainer_its_flags(tmp_path, backend, every):
    """sd-scripts would validate after each epoch too."""
    model = {"diffusers": "tiny-flux", "sd-scripts": "flux-dev"}[backend]
    fields = {"name": "t", "trigger": "x", "model": model, "backend": backend, "sample_every_n_steps": 20, "seed": 5}
    plain, held = (command.flags(runs.make(fields | {"validation_split": share}), tmp_path) for share in (0, 0.1))
    settings = {"validation_split": 0.1, "validation_seed": 5, "validate_every_n_steps": 20, **every}
    assert {name: value for name, value in held.items() if name not in plain} == settings
