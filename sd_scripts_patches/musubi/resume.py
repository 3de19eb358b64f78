"""A resumed run continues as the uninterrupted one, with the machinery of resume.py.

musubi-tuner loads the state and then trains from step 0 of epoch 1, to the full number of steps, with the learning rate
and the optimizer of the state (measured: a state of step 10 of 24 is trained for 24 more). Its position is local to
`_run_training_loop`, whose syntax tree is rewritten.

Its data sets shuffle when the first item of a new epoch is read, once for each epoch, from a seed of the run. So the
order of an epoch follows from that seed, the number of the epoch and the order of the cache files, which is that of their
names here and not that of the folder. The seed and the pool of timesteps (`--num_timestep_buckets`) are in the state.
"""

from __future__ import annotations

import argparse
import ast
import glob
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sd_scripts_patches import ast_utils, legacy_state, resume, sampling, session, train_loop, trainer_state
from sd_scripts_patches.musubi import BASE, DATASET, LOOP, TRAIN_UTILS
from sd_scripts_patches.patch import Patch, Target, around, find_function, function, with_names
from sd_scripts_patches.trainer_state import ResumeError, TrainerState

LOCALS = (
    *("args", "accelerator", "train_dataloader", "loss_recorder", "progress_bar", "epoch_to_start"),
    *("num_train_epochs", "global_step", "epoch", "step", "batch", "loss", "sample_parameters"),
)
"""The local variables of the training loop that the inserted statements use."""
REX = ("max_lr", "min_lr", "num_steps", "num_warmup_steps", "rex_alpha", "rex_beta")
"""What musubi-tuner's REX schedule keeps in its state, of the settings of a run."""
_STEP = re.compile(r"-step(\d{8})-state$")
logger = logging.getLogger(__name__)


class Run(resume.Run):
    """The run of this process."""

    trainer: Any = None
    no_count = SimpleNamespace(value=0)  # sd-scripts shares its count of steps with its loader's workers
    rex: Any = ()  # each REX schedule, and its settings in this run

    def find_position(self, args: argparse.Namespace, loader: Any) -> None:
        """After the state is loaded, before anything uses the position. Raises ResumeError."""
        if not args.resume:
            return
        self.keep_rates()
        shape = (len(loader), args.gradient_accumulation_steps, self.accelerator.num_processes)
        state = self.loaded
        if state is None:
            state = self._infer(args, shape)
        else:
            state = resume._in_shape(state, shape)
            for dataset, seed in zip(loader.dataset.datasets, state.extra.get("seeds", ()), strict=False):
                dataset.seed = seed
            self.trainer.timestep_range_pool = [tuple(pair) for pair in state.extra.get("timesteps", ())]
        args.sample_at_first = False  # that was before step 1
        self.resume_from = state

    def _load(self, folder: Path) -> None:
        schedules = [one.scheduler for one in self.accelerator._schedulers]
        self.rex = [(one, {name: vars(one)[name] for name in REX}) for one in schedules if hasattr(one, "rex_alpha")]
        super()._load(folder)

    def keep_rates(self) -> None:
        super().keep_rates()  # the schedules of transformers keep no setting in their state
        for schedule, own in self.rex:
            vars(schedule).update(own)
            schedule._last_lr = schedule.get_lr()
            for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
                group["lr"] = rate

    def missing_epochs(self, args: argparse.Namespace, sample_parameters: Any) -> Iterator[tuple[int, int]]:
        """Yield (epoch, step) when an epoch's state was saved and a kill lost its samples."""
        state = self.resume_from
        if state is not None and state.epoch_over and sample_parameters:
            own = SimpleNamespace(output_dir=args.output_dir, output_name="sample")  # as Kandinsky 5 names them
            found = sampling.sample_files(args, f"e{state.epoch:06d}") + sampling.sample_files(own, f"{state.step:06d}")
            if len(found) < len(sample_parameters):
                yield state.epoch, state.step

    def _infer(self, args: argparse.Namespace, shape: tuple[int, int, int]) -> TrainerState:
        """Return the position in a state that musubi-tuner wrote without the patches."""
        folder = Path(args.resume)
        named = _STEP.search(folder.name)
        counted = legacy_state.scheduler_steps(self.accelerator)
        step = int(named[1]) if named else counted
        if step is None:
            raise ResumeError(
                f"--resume {folder}: saved without hangproof, and its step is unknown: neither its name nor its learning "
                "rate scheduler holds it. Start a new training from its weights with --network_weights"
            )
        logger.warning(
            f"hangproof: {folder} was saved without hangproof: it is resumed after step {step}; the average loss and the "
            "order of the images in this epoch may differ from an uninterrupted run"
        )
        now = trainer_state.generators()
        return legacy_state.state_at_step(step, shape, epoch_over=named is None, now=now)

    def _shuffle(self, loader: Any, state: TrainerState) -> None:
        """Shuffle each data set as often as the interrupted run had: at the first read of an epoch from it, which seeds
        python's generator. Workers do it when they start, and the first read does what is left."""
        for dataset, epoch in zip(loader.dataset.datasets, state.extra.get("epochs", ()), strict=False):
            while not loader.num_workers and dataset.current_epoch < epoch:
                dataset.current_epoch += 1
                dataset.shuffle_buckets()

    def _extra(self) -> dict[str, Any]:
        datasets = self.loader.dataset.datasets
        return super()._extra() | {
            "seeds": [dataset.seed for dataset in datasets],
            "epochs": [dataset.current_epoch for dataset in datasets],
            "timesteps": [list(pair) for pair in self.trainer.timestep_range_pool],
        }


run = Run()


def prepare(worker: bool) -> None:
    """The saves of this process ask for the position of this run."""
    session.run = run


def sorted_glob(*args: Any, **kwargs: Any) -> list[str]:
    """Return the paths that match, in the order of their names."""
    return sorted(glob.glob(*args, **kwargs))


@around
def _register_hooks(original: Callable, self: Any, args: Any, accelerator: Any, network: Any) -> Any:
    run.trainer = self
    run.register_hooks(accelerator)
    return original(self, args, accelerator, network)


def rewrite(tree: ast.Module) -> ast.Module:
    """Insert the calls to `run` into the training loop. Raises Incompatible when a statement is not there once."""
    loop = find_function(tree, LOOP)
    ast_utils.require_variables(loop, LOCALS)
    find, insert = ast_utils.find_statement, ast_utils.insert
    first = find(loop, ast.Assign, "epoch_to_start = 0")
    insert(loop, first, before="_hangproof_run.find_position(args, train_dataloader)")
    epochs = find(loop, ast.For, "for epoch in range(epoch_to_start, num_train_epochs)")
    right_before = ast.Module([loop.body[loop.body.index(epochs) - 1]], [])
    train_mode = find(right_before, ast.Expr, "optimizer_train_fn()")
    # Until then, a schedule-free optimizer has the weights of the epoch's end: to convert them there and back rounds them.
    samples = "for _hangproof_place in _hangproof_run.missing_epochs(args, sample_parameters):\n    _do_sample(*_hangproof_place)"
    insert(loop, train_mode, before=samples)
    train_mode.value = ast_utils.parse_expression("_hangproof_run.finished(args) or optimizer_train_fn()")
    train_loop.rewrite_loops(loop, "train_dataloader", "_hangproof_run.no_count")
    ast_utils.insert_import(tree, "from sd_scripts_patches.musubi.resume import run as _hangproof_run")
    return tree


PATCH = Patch(
    name="resume",
    why="a resumed run trains all its steps again, from step 0, and changes the order of the images",
    targets=(
        function(BASE, "NetworkTrainer.train(self, args)", resume._check_state_first),
        function(BASE, "NetworkTrainer._register_hooks_and_resume(self, args, accelerator, network)", _register_hooks),
        function(TRAIN_UTILS, "LossRecorder.add(self)"),
        function(DATASET, "ImageDataset.shuffle_buckets(self)"),
        function(DATASET, "VideoDataset.shuffle_buckets(self)"),
        Target(DATASET, "glob", beside="ImageDataset", make=with_names(glob=sorted_glob)),
        *(t for t in resume.PATCH.targets if t.module == "accelerate.accelerator"),
    ),
    rewrites=((function(BASE, f"{LOOP}(self, args, accelerator)"), rewrite),),
    prepare=prepare,
)
