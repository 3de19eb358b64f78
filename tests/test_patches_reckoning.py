"""Where a run is after so many steps, what a state says of itself, and what is refused: all without a run."""

import argparse
import ast
import json
import logging
import random
from types import SimpleNamespace

import pytest
import tiny_sd_scripts as tiny

from guards import checkpoint
from sd_scripts_patches import place as places
from sd_scripts_patches import reckoning, resume
from sd_scripts_patches.patch import DoesNotFit


def state(folder, **train_state):
    made = folder / "tiny-step00000012-state"
    made.mkdir()
    (made / "train_state.json").write_text(json.dumps(train_state))
    return made


def test_a_plain_state_is_accepted(tmp_path):
    reckoning.check(state(tmp_path, current_epoch=2, current_step=12))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"current_epoch": 1}', '{"current_epoch": 1, "current_step": -3}', '{"current_epoch": 1, "current_step": "12"}']
)  # fmt: skip
def test_a_damaged_json_is_refused_unless_the_user_knows_the_step(tmp_path, text):
    made = state(tmp_path)
    (made / "train_state.json").write_text(text)
    with pytest.raises(places.ResumeError, match=r"train_state\.json is damaged .*--initial_step"):
        reckoning.check(made)
    reckoning.check(made, step_is_given=True)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(places.ResumeError, match="there is no such folder"):
        reckoning.check(tmp_path / "nowhere")


def test_a_guarded_state_that_was_damaged_is_refused_with_the_file(tmp_path):
    with checkpoint.writing(tmp_path / "tiny-step00000012-state", 12, 1) as folder:
        (folder / "train_state.json").write_text(json.dumps({"current_epoch": 2, "current_step": 12}))
        (folder / "optimizer.bin").write_bytes(b"x" * 100)
    made = tmp_path / "tiny-step00000012-state"
    reckoning.check(made)
    (made / "optimizer.bin").write_bytes(b"x" * 50)
    with pytest.raises(places.ResumeError, match=r"optimizer\.bin: 50 bytes where 100 were written"):
        reckoning.check(made)


@pytest.mark.parametrize("content", ["{", "[1]", '{"version": 9}', '{"version": 1, "steps": 3}'])
def test_a_damaged_place_is_refused(tmp_path, content):
    made = state(tmp_path, current_epoch=2, current_step=12)
    (made / places.FILE).write_text(content)
    with pytest.raises(places.ResumeError, match=places.FILE):
        reckoning.check(made)


@pytest.mark.parametrize(
    ("step", "batches", "accumulation", "epoch", "batch"),
    [
        *[
            (0, 10, 1, 1, 0),
            (1, 10, 1, 1, 1),
            (10, 10, 1, 1, 10),
            (15, 10, 1, 2, 5),
            (3, 10, 2, 1, 6),
            (5, 10, 2, 1, 10),
        ],
        *[(7, 10, 3, 2, 9), (4, 10, 3, 1, 10), (8, 10, 3, 2, 10), (3, 5, 4, 2, 4), (2, 5, 4, 1, 5), (6, 3, 8, 6, 3)],
    ],
)
def test_where_an_epoch_is_after_so_many_steps(step, batches, accumulation, epoch, batch):
    found = reckoning.locate(step, (batches, accumulation, 1), over=True, now=None, losses={})
    assert (found.epoch, found.batch) == (epoch, batch)
    assert found.epoch_over == (batch == batches)


def loaded(tmp_path, caplog=None, shape=(10, 1, 1), place=None, told=None, scheduler=None, **args):
    """`Run.loaded` on an accelerator that has only what it looks at."""
    given = {
        "resume": str(tmp_path / "x-step00000012-state"),
        "initial_step": None,
        "initial_epoch": None,
        "resume_from_huggingface": False,
    }
    args = argparse.Namespace(**{**given, "gradient_accumulation_steps": shape[1], **args})
    count = SimpleNamespace(state_dict=lambda: {"last_epoch": scheduler}, split_batches=False)
    run = resume.Run()
    run.accelerator = SimpleNamespace(num_processes=shape[2], _schedulers=[count] if scheduler is not None else [])
    run.found = place
    assert run.loaded(args, told, range(shape[0])) is None
    assert args.initial_step is args.initial_epoch is None and not args.sample_at_first
    return run.resumed


def known(step=12, **changed):
    return places.Place(
        **{
            "step": step,
            "epoch": 2,
            "batch": 2,
            "epoch_over": False,
            "batches": 10,
            "accumulation": 1,
            "processes": 1,
            "workers": 0,
            **changed,
        }
    )


def test_a_step_given_that_the_state_contradicts_is_refused(tmp_path):
    with pytest.raises(places.ResumeError, match="after step 12, but --initial_step or --initial_epoch says 10"):
        loaded(tmp_path, place=known(), initial_epoch=2)
    assert loaded(tmp_path, place=known(10), initial_epoch=2).step == 10


def test_another_shape_keeps_the_step_and_says_what_changed(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        found = loaded(tmp_path, place=known(), shape=(10, 2, 1))
    assert (found.step, found.epoch, found.batch) == (12, 3, 4)
    assert "gradient accumulation 1, now 2" in caplog.text and "batches an epoch" not in caplog.text


@pytest.mark.parametrize(
    ("told", "scheduler", "step"), [(12, 12, 12), (2, 12, 12), (12, 11, 12), (12, None, 12), (None, None, 0)]
)
def test_of_two_counts_the_higher_one_is_right(tmp_path, told, scheduler, step):
    assert loaded(tmp_path, told=told, scheduler=scheduler).step == step


def test_the_generators_come_back_from_json():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")

    def draw():
        return [random.random(), random.gauss(0, 1), float(numpy.random.normal()), float(torch.randn(()))]

    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    draw()  # a gauss has its second half waiting
    state = json.loads(json.dumps(places.to_json(places.generators())))
    expected = draw()
    assert draw() != expected
    assert places.restore(places.from_json(state)) == []
    assert draw() == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("enumerate(skipped_dataloader or train_dataloader)", "enumerate(train_dataloader)"),
        ("global_step += 1", "global_step = global_step + 1"),
        ("for epoch in range(epoch_to_start, num_train_epochs)", "for epoch in range(num_train_epochs)"),
        ("steps_from_state = None\n", "steps_of_state = None\n"),
        ("loss_recorder.add(", "loss_recorder.put("),
        ("train_util.resume_from_local_or_hf_if_specified(accelerator, args)", "train_util.resume(accelerator, args)"),
    ],
)
def test_a_train_loop_that_has_moved_on_is_refused(old, new):
    tiny.need(run=False)
    source = (tiny.checkout() / "train_network.py").read_text(encoding="utf-8")
    resume.rewrite(ast.parse(source))
    assert old in source
    with pytest.raises(DoesNotFit):
        resume.rewrite(
            ast.parse(
                source.replace(old, new).replace("steps_from_state", "steps_of_state")
                if "steps_of" in new
                else source.replace(old, new)
            )
        )
