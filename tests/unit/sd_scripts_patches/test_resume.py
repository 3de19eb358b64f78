"""At which step, and with which seed, a run is resumed. No training run."""

import argparse
import logging
from types import SimpleNamespace

import accelerate
import pytest
import torch

from sd_scripts_patches import data_order, resume, sampling, trainer_state
from sd_scripts_patches.musubi import resume as musubi


def loaded(tmp_path, shape=(10, 1, 1), state=None, json_step=None, scheduler=None, **args):
    """Return what `Run.after_load` resumes from, with an accelerator that has only what it uses."""
    given = {"resume": str(tmp_path / "x-step00000012-state"), "resume_from_huggingface": False}
    given |= {"initial_step": None, "initial_epoch": None, "gradient_accumulation_steps": shape[1], **args}
    args = argparse.Namespace(**given)
    count = SimpleNamespace(state_dict=lambda: {"last_epoch": scheduler}, split_batches=False, scheduler=None)
    run = resume.Run()
    schedulers = [count] if scheduler is not None else []
    run.accelerator = SimpleNamespace(num_processes=shape[2], _schedulers=schedulers, _optimizers=[])
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


def test_a_run_that_began_with_an_initial_epoch_goes_on_after_a_kill_with_the_same_command(tmp_path):
    state = known()
    state.extra = {"requested": 10}  # as the run wrote it, whose own steps count from 0
    assert loaded(tmp_path, state=state, initial_epoch=2).step == 12


def test_a_run_that_begins_within_an_epoch_counts_the_batches_that_it_skips():
    """--initial_step with --skip_until_initial_step: a state of it named a place in the epoch that is too early."""
    loader, run = torch.utils.data.DataLoader(range(5)), resume.Run()
    run.loader, run.args = loader, argparse.Namespace(seed=1)
    assert [run.batch for _ in run.iterate_batches(accelerate.skip_first_batches(loader, 2), 0)] == [3, 4, 5]


def test_other_settings_keep_the_step_and_are_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        found = loaded(tmp_path, state=known(), shape=(10, 2, 1))
    assert (found.step, found.epoch, found.batch) == (12, 3, 4)
    assert "gradient accumulation 1, now 2" in caplog.text and "batches per epoch" not in caplog.text


@pytest.mark.parametrize(
    ("drawn", "end", "lost"),
    [
        ("x_e000002_00_20.png", ".png", 0),
        ("sample_000012_00.png", ".png", 0),
        ("sample_000012_00.png", "", 1),
        ("x_000012_00.png", ".png", 1),
        ("x_e000002_00_20.png", "", 1),
        ("x_e000002_00_20.mp4", ".mp4", 0),
        ("x_e000002_00_20.mp4", "", 1),
    ],
)
def test_an_epochs_samples_are_drawn_again_only_if_a_kill_lost_them_also_those_of_kandinsky(tmp_path, drawn, end, lost):
    """Also if it cut off the last one, which is then removed."""
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample" / drawn).write_bytes(sampling.COMPLETE.get(end, b"cut"))
    run = musubi.Run()
    run.resume_from = trainer_state.TrainerState(**{**vars(known()), "epoch_over": True})
    args = argparse.Namespace(output_dir=tmp_path, output_name="x")
    assert list(run.missing_epochs(args, [{}])) == [(2, 12)] * lost
    assert (tmp_path / "sample" / drawn).exists() == bool(end)


@pytest.mark.parametrize(
    ("json_step", "scheduler", "step"), [(12, 12, 12), (2, 12, 12), (12, 11, 12), (12, None, 12), (None, None, 0)]
)
def test_of_two_counts_the_higher_one_is_right(tmp_path, json_step, scheduler, step):
    assert loaded(tmp_path, json_step=json_step, scheduler=scheduler).step == step


@pytest.mark.parametrize(
    ("rates", "steps", "weights"),
    [((1e-3, 2e-3), 10, torch.float32), ((5e-4, 2e-3), 10, torch.float16), ((1e-3, 2e-3), 20, torch.float32)],
)
def test_a_resumed_run_has_the_learning_rates_of_its_own_settings_and_schedule(tmp_path, rates, steps, weights):
    """A state holds those of the interrupted run. A mitigation halves them; a longer training has a longer schedule.
    What the optimizer keeps has its own type, unless that of the weights has changed: torch casts it to theirs, and
    ProdigyPlus, or Adafactor with --full_bf16, would round other numbers."""

    def made(first, second, steps=10):
        groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in (first, second)]
        optimizer = torch.optim.AdamW(groups)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)

    def train(optimizer, scheduler, steps):
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        return scheduler.get_last_lr()

    before, (optimizer, scheduler) = made(1e-3, 2e-3), made(*rates, steps)
    train(*before, 3)
    run = resume.Run()
    optimizer.optimizer = optimizer  # as accelerate wraps it
    run.accelerator = SimpleNamespace(_optimizers=[optimizer], _schedulers=[SimpleNamespace(scheduler=scheduler)])
    state, half = known(), torch.ones(2, dtype=torch.bfloat16)
    before[0].state[before[0].param_groups[0]["params"][0]] = {"s": half, "factors": [half, 3], "step": 1}
    before[0].state["ema"] = {"short": 0.5}  # EmoNavi keeps what belongs to no weights
    state.extra = {"type": str(weights)}
    trainer_state.write(tmp_path, state)
    run._load(tmp_path)
    for one, saved in zip((optimizer, scheduler), before, strict=True):
        one.load_state_dict(saved.state_dict())
    found = optimizer.state.pop(optimizer.param_groups[0]["params"][0])
    assert {found["s"].dtype, found["factors"][0].dtype} == {half.dtype if weights == torch.float32 else torch.float32}
    run.keep_rates()
    for more in (0, 1):
        assert train(optimizer, scheduler, more) == [rate * (1 - (3 + more) / steps) for rate in rates]


class Rex(torch.optim.lr_scheduler.LRScheduler):
    """As musubi-tuner's: what it computes with is in its state."""

    def __init__(self, rate, steps):
        self.max_lr, self.min_lr, self.num_steps, self.num_warmup_steps, self.rex_alpha = rate, 0, steps, 0, 0.1
        self.rex_beta = 0.9
        super().__init__(torch.optim.AdamW([torch.zeros(1, requires_grad=True)], rate))

    def get_lr(self):
        return [self.max_lr * (1 - self.last_epoch / self.num_steps)]


def test_musubi_tuners_rex_schedule_has_the_length_and_the_rate_of_the_resumed_run(tmp_path):
    before, schedule, run = Rex(1e-3, 4), Rex(5e-4, 8), musubi.Run()
    for _ in range(3):
        before.optimizer.step()
        before.step()
    schedule.optimizer.optimizer = schedule.optimizer  # as accelerate wraps it
    run.accelerator = SimpleNamespace(
        _optimizers=[schedule.optimizer], _schedulers=[SimpleNamespace(scheduler=schedule)]
    )
    run._load(tmp_path)
    schedule.optimizer.load_state_dict(before.optimizer.state_dict())
    schedule.load_state_dict(before.state_dict())
    run.keep_rates()
    assert schedule.get_last_lr() == [group["lr"] for group in schedule.optimizer.param_groups] == [5e-4 * 5 / 8]


def test_adafactor_with_relative_steps_keeps_the_rate_that_it_has_computed():
    group, run = {"lr": 7e-8, "relative_step": True}, resume.Run()
    run.accelerator = SimpleNamespace(_optimizers=[SimpleNamespace(param_groups=[group])], _schedulers=[])
    run.rates = [1e-3]
    run.keep_rates()
    assert group["lr"] == 7e-8


class DataSet:
    """One of sd-scripts, as far as it knows where the run is."""

    def __init__(self, step=0):
        self.current_epoch, self.current_step, self.seed = 0, step, 5
        self.datasets = [self]

    def set_current_epoch(self, epoch):
        self.current_epoch = epoch

    def set_current_step(self, step):
        self.current_step = step


@pytest.mark.parametrize(("workers", "step"), [(0, 17), (2, 20)])
def test_an_epoch_begins_with_the_step_at_which_the_data_set_was_read_last(workers, step):
    """Else its first batch has the tags of step 0 with token_warmup_step. One batch was read ahead, two trained."""
    before, run, state = resume.Run(), resume.Run(), known(20)
    before.args, before.loader = argparse.Namespace(seed=1), SimpleNamespace(dataset=DataSet(17), num_workers=workers)
    state.epoch, state.batch, state.extra = 3, 0, before._extra()
    run.loader = SimpleNamespace(dataset=DataSet(), num_workers=workers, persistent_workers=bool(workers))
    run._shuffle(run.loader, state)
    assert (run.loader.dataset.current_epoch, run.loader.dataset.current_step) == (2, step)


@pytest.mark.parametrize(("extra", "shuffles"), [({"epochs": [2, 1]}, [2, 1]), ({}, [0, 0])])
def test_a_data_set_of_musubi_tuner_is_shuffled_as_often_as_the_interrupted_run_had(extra, shuffles):
    """In the second epoch nothing has been read from the second one yet: its first read seeds python's generator."""
    done = [0, 0]
    datasets = [
        SimpleNamespace(current_epoch=0, shuffle_buckets=lambda n=n: done.__setitem__(n, done[n] + 1)) for n in (0, 1)
    ]
    state = known()
    state.extra = extra
    musubi.Run()._shuffle(SimpleNamespace(num_workers=0, dataset=SimpleNamespace(datasets=datasets)), state)
    assert done == shuffles == [dataset.current_epoch for dataset in datasets]


def test_the_batches_after_the_one_that_was_read_ahead_have_the_tags_of_the_step_that_a_validation_left():
    run, state = resume.Run(), known(20)
    state.now, state.extra = trainer_state.generators(), {"dataset_step": 19}
    state.fetch = {"position": 2, "generators": state.now, "dataset_step": 17, "current_step": 18}
    run.replay, run.current_step, run.accelerator = state, SimpleNamespace(value=0), SimpleNamespace(num_processes=1)
    run.loader, steps = SimpleNamespace(dataset=DataSet(), num_workers=0), []
    for _ in data_order.ObservedSampler(range(4), lambda: steps.append("order"), run._on_position):
        steps.append(run.loader.dataset.current_step)
        run.loader.dataset.set_current_step(run.current_step.value)  # as the collator does
    assert steps == ["order", 0, 0, 17, 19]


def test_a_finished_run_that_is_resumed_saves_its_state_again_so_that_it_can_still_train_longer(tmp_path, monkeypatch):
    """A kill after the last save: what the batch that was read ahead had drawn was lost."""
    old = []
    monkeypatch.setattr(resume.save, "finish_deletions", lambda args, *place: old.append(place))
    run, data, state = resume.Run(), DataSet(), known()
    loader = torch.utils.data.DataLoader(data, sampler=range(10))
    state.epoch_over, state.now, state.extra = True, trainer_state.generators(), {"dataset_step": 11}
    state.fetch = {"position": 2, "generators": state.now, "dataset_step": 10, "current_step": 11}
    args = argparse.Namespace(max_train_steps=12, output_dir=tmp_path, gradient_accumulation_steps=1, seed=1)
    run.accelerator, run.resume_from = SimpleNamespace(num_processes=1, _optimizers=[]), state
    recorder, bar = SimpleNamespace(loss_list=[1.0], loss_total=1.0), SimpleNamespace(refresh=list)
    run.begin_training(args, loader, recorder, bar, SimpleNamespace(), 0, 0)
    assert not [*run.iterate_batches(loader, 1)]
    saved = run.current_state()
    assert (saved.epoch, saved.batch, saved.epoch_over, saved.fetch) == (2, 2, True, state.fetch)
    assert old == [(12, 1)]


def seed_of_a_run(resume_from=None, seed=None):
    args = argparse.Namespace(resume=resume_from, resume_from_huggingface=False, seed=seed)
    return resume._check_state_first(lambda trainer, args: args.seed)(None, args)


@pytest.mark.parametrize(("processes", "given", "same"), [(2, None, True), (2, 7, True), (1, None, False)])
def test_all_ranks_of_kohyas_trainers_have_one_seed(monkeypatch, processes, given, same):
    seeds = []
    for rank in range(2):
        for name, value in {"WORLD_SIZE": processes, "MASTER_ADDR": "h", "MASTER_PORT": 29400, "RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        seeds.append(seed_of_a_run(seed=given))
    assert seeds[0] == seeds[1] and (seeds[0] is not None) == same and given in (None, seeds[0])


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", [resume.Run, musubi.Run])
def test_a_run_without_a_seed_resumes_with_that_of_the_interrupted_one(tmp_path, monkeypatch, processes, kind):
    """Else its order of the images, and the images that it holds out for validation, would be others."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    run, state = kind(), known()
    run.args, run.loader = argparse.Namespace(seed=1234), SimpleNamespace(dataset=DataSet(), num_workers=0)
    run.trainer = SimpleNamespace(timestep_range_pool=[])
    state.extra = run._extra()
    trainer_state.write(tmp_path, state)
    assert seed_of_a_run(tmp_path) == 1234 and seed_of_a_run(tmp_path, seed=7) == 7
    state.extra = {}  # of an older version
    trainer_state.write(tmp_path, state)
    assert (seed_of_a_run(tmp_path) is None) == (processes == 1)


@pytest.mark.slow
def test_a_state_of_a_compiled_run_has_the_weights_of_its_network():
    """kohya's hook leaves out all models whose type is not that of `unwrap_model(network)`."""
    network = torch.nn.Linear(2, 2)
    unwrap = resume._unwrap_compiled(accelerate.Accelerator.unwrap_model)
    assert unwrap(None, torch.compile(network, backend="eager")) is network
