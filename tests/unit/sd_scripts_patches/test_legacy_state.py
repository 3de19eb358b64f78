"""The position of a run after so many steps, states with and without our file, and refusals. No training run."""

import argparse
import json
import logging
import random
from types import SimpleNamespace

import pytest

from guards import checkpoint
from sd_scripts_patches import legacy_state, resume, trainer_state


def state(folder, **train_state):
    made = folder / "tiny-step00000012-state"
    made.mkdir()
    (made / "train_state.json").write_text(json.dumps(train_state))
    return made


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", '{"current_epoch": 1}', '{"current_epoch": 1, "current_step": -3}', '{"current_epoch": 1, "current_step": "12"}']
)  # fmt: skip
def test_a_missing_or_damaged_json_is_refused_unless_the_user_gives_the_step(tmp_path, text):
    made = state(tmp_path, current_epoch=2, current_step=12)
    legacy_state.check_state(made)
    path = made / "train_state.json"
    path.unlink() if text is None else path.write_text(text)
    reason = "is missing, so the step of this state is unknown" if text is None else "is damaged"
    with pytest.raises(trainer_state.ResumeError, match=rf"train_state\.json {reason}.*--initial_step"):
        legacy_state.check_state(made)
    legacy_state.check_state(made, step_is_given=True)


def test_a_missing_folder_and_a_damaged_state_with_a_guard_file_are_refused_and_named(tmp_path):
    made = tmp_path / "tiny-step00000012-state"
    with pytest.raises(trainer_state.ResumeError, match="the folder does not exist"):
        legacy_state.check_state(made)
    with checkpoint.writing(made, 12, 1) as folder:
        (folder / "train_state.json").write_text(json.dumps({"current_epoch": 2, "current_step": 12}))
        (folder / "optimizer.bin").write_bytes(b"x" * 100)
    legacy_state.check_state(made)
    (made / "optimizer.bin").write_bytes(b"x" * 50)
    with pytest.raises(trainer_state.ResumeError, match=r"optimizer\.bin: truncated: 50 bytes instead of 100"):
        legacy_state.check_state(made)


@pytest.mark.parametrize("content", ["{", "[1]", '{"version": 9}', '{"version": 1, "steps": 3}'])
def test_a_damaged_trainer_state_is_refused(tmp_path, content):
    made = state(tmp_path, current_epoch=2, current_step=12)
    (made / trainer_state.FILE).write_text(content)
    with pytest.raises(trainer_state.ResumeError, match=trainer_state.FILE):
        legacy_state.check_state(made)


# step, batches, accumulation → epoch, batch
POSITIONS = [
    (0, 10, 1, 1, 0), (1, 10, 1, 1, 1), (10, 10, 1, 1, 10), (15, 10, 1, 2, 5), (3, 10, 2, 1, 6), (5, 10, 2, 1, 10),
    (7, 10, 3, 2, 9), (4, 10, 3, 1, 10), (8, 10, 3, 2, 10), (3, 5, 4, 2, 4), (2, 5, 4, 1, 5), (6, 3, 8, 6, 3),
]  # fmt: skip


@pytest.mark.parametrize(("step", "batches", "accumulation", "epoch", "batch"), POSITIONS)
def test_the_position_in_an_epoch_after_so_many_steps(step, batches, accumulation, epoch, batch):
    found = legacy_state.state_at_step(step, (batches, accumulation, 1), epoch_over=True, now=None, losses={})
    assert (found.epoch, found.batch) == (epoch, batch)
    assert found.epoch_over == (batch == batches)


def loaded(tmp_path, shape=(10, 1, 1), state=None, json_step=None, scheduler=None, **args):
    """Return what `Run.after_load` resumes from, with an accelerator that has only what it uses."""
    given = {"resume": str(tmp_path / "x-step00000012-state"), "resume_from_huggingface": False}
    given |= {"initial_step": None, "initial_epoch": None, "gradient_accumulation_steps": shape[1], **args}
    args = argparse.Namespace(**given)
    count = SimpleNamespace(state_dict=lambda: {"last_epoch": scheduler}, split_batches=False)
    run = resume.Run()
    run.accelerator = SimpleNamespace(num_processes=shape[2], _schedulers=[count] if scheduler is not None else [])
    run.loaded = state
    assert run.after_load(args, json_step, range(shape[0])) is None
    assert args.initial_step is args.initial_epoch is None and not args.sample_at_first
    return run.resume_from


def known(step=12):
    counts = {"epoch": 2, "batch": 2, "batches": 10, "accumulation": 1, "processes": 1, "workers": 0}
    return trainer_state.TrainerState(step=step, epoch_over=False, **counts)


def test_a_step_that_contradicts_the_state_is_refused(tmp_path):
    message = "after step 12, but --initial_step or --initial_epoch names step 10"
    with pytest.raises(trainer_state.ResumeError, match=message):
        loaded(tmp_path, state=known(), initial_epoch=2)
    assert loaded(tmp_path, state=known(10), initial_epoch=2).step == 10


def test_other_settings_keep_the_step_and_are_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        found = loaded(tmp_path, state=known(), shape=(10, 2, 1))
    assert (found.step, found.epoch, found.batch) == (12, 3, 4)
    assert "gradient accumulation 1, now 2" in caplog.text and "batches per epoch" not in caplog.text


@pytest.mark.parametrize(
    ("json_step", "scheduler", "step"), [(12, 12, 12), (2, 12, 12), (12, 11, 12), (12, None, 12), (None, None, 0)]
)
def test_of_two_counts_the_higher_one_is_right(tmp_path, json_step, scheduler, step):
    assert loaded(tmp_path, json_step=json_step, scheduler=scheduler).step == step


def test_the_generators_come_back_from_json():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")

    def draw():
        return [random.random(), random.gauss(0, 1), float(numpy.random.normal()), float(torch.randn(()))]

    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    draw()  # random.gauss keeps the second of each pair of numbers
    state = json.loads(json.dumps(trainer_state.to_json(trainer_state.generators())))
    expected = draw()
    assert draw() != expected
    assert trainer_state.restore(trainer_state.from_json(state)) == []
    assert draw() == expected
