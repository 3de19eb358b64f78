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
from typing import Any

from sd_scripts_patches import ast_utils, legacy_state, resume, session, snapshots, trainer_state
from sd_scripts_patches.musubi import BASE, DATASET, LOOP, TRAIN_UTILS
from sd_scripts_patches.patch import Patch, Target, find_function
from sd_scripts_patches.trainer_state import ResumeError, TrainerState

LOCALS = (
    *("args", "accelerator", "train_dataloader", "loss_recorder", "progress_bar", "epoch_to_start"),
    *("num_train_epochs", "global_step", "epoch", "step", "batch", "loss", "sample_parameters"),
)
"""The local variables of the training loop that the inserted statements use."""
_STEP = re.compile(r"-step(\d{8})-state$")
logger = logging.getLogger(__name__)


class NoCount:
    """Stands for the count of steps that sd-scripts shares with its loader's workers; musubi-tuner has none."""

    @property
    def value(self) -> int:
        return 0

    @value.setter
    def value(self, count: int) -> None:
        """Nothing counts."""


class Run(resume.Run):
    """The run of this process."""

    trainer: Any = None

    def find_position(self, args: argparse.Namespace, loader: Any) -> None:
        """After the state is loaded, before anything uses the position. Raises ResumeError."""
        if not args.resume:
            return
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

    def begin(
        self,
        args: argparse.Namespace,
        loader: Any,
        recorder: Any,
        progress_bar: Any,
        epoch_to_start: int,
        global_step: int,
    ) -> tuple[int, int]:
        """Before the first epoch: return (index of the epoch to start with, global step)."""
        return self.begin_training(args, loader, recorder, progress_bar, NoCount(), epoch_to_start, global_step)

    def missing_epochs(self, args: argparse.Namespace, sample_parameters: Any) -> Iterator[tuple[int, int]]:
        """Yield (epoch, step) when an epoch's state was saved and a kill lost its samples."""
        state = self.resume_from
        if state is None or not state.epoch_over or not sample_parameters:
            return
        name = f"{glob.escape(args.output_name)}_" if args.output_name else ""
        found = list(Path(args.output_dir, "sample").glob(f"{name}e{state.epoch:06d}_*"))
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
        now = trainer_state.to_json(trainer_state.generators())
        return legacy_state.state_at_step(step, shape, epoch_over=named is None, now=now, losses={})

    def _shuffle(self, loader: Any, state: TrainerState) -> None:
        """Shuffle the data sets as often as the trainer itself has read from them. Workers do it when they start."""
        if loader.num_workers:
            return
        for dataset in loader.dataset.datasets:
            while dataset.current_epoch < (state.epoch if state.batch else state.epoch - 1):
                dataset.current_epoch += 1
                dataset.shuffle_buckets()

    def _dataset_step(self) -> int:
        return 0

    def _set_dataset_step(self, step: int) -> None:
        """The data sets do not count steps."""

    def _extra(self) -> dict[str, Any]:
        return {
            "seeds": [dataset.seed for dataset in self.loader.dataset.datasets],
            "timesteps": [list(pair) for pair in self.trainer.timestep_range_pool],
        }


run = Run()


def prepare(worker: bool) -> None:
    """The saves of this process ask for the position of this run."""
    session.run = run


class SortedGlob:
    """`glob` whose results are in the order of their names."""

    def __getattr__(self, name: str) -> object:
        return getattr(glob, name)

    @staticmethod
    def glob(*args: Any, **kwargs: Any) -> list[str]:
        """Return the paths that match, sorted."""
        return sorted(glob.glob(*args, **kwargs))


def _check_state_first(original: Callable) -> Callable:
    """Check the state that `--resume` names before anything is loaded."""

    def train(self: Any, args: Any) -> Any:
        if args.resume and not args.resume_from_huggingface:
            snapshots.make_state(args.resume)
            legacy_state.check_state(Path(args.resume), step_is_given=True)
        return original(self, args)

    return train


def _register_hooks(original: Callable) -> Callable:
    def _register_hooks_and_resume(self: Any, args: Any, accelerator: Any, network: Any) -> Any:
        run.trainer = self
        run.register_hooks(accelerator)
        return original(self, args, accelerator, network)

    return _register_hooks_and_resume


def rewrite(tree: ast.Module) -> ast.Module:
    """Insert the calls to `run` into the training loop. Raises Incompatible when a statement is not there exactly once."""
    loop = find_function(tree, LOOP)
    ast_utils.require_variables(loop, LOCALS)
    find, insert = ast_utils.find_statement, ast_utils.insert
    first = find(loop, ast.Assign, "epoch_to_start = 0")
    epochs = find(loop, ast.For, "for epoch in range(epoch_to_start, num_train_epochs)")
    batches = find(epochs, ast.For, "for (step, batch) in enumerate(train_dataloader)")
    count = find(batches, ast.AugAssign, "global_step += 1")
    record = find(batches, ast.Expr, "loss_recorder.add(", prefix=True)
    insert(loop, first, before="_hangproof_run.find_position(args, train_dataloader)")
    insert(
        loop,
        epochs,
        before="for _hangproof_epoch, _hangproof_step in _hangproof_run.missing_epochs(args, sample_parameters):\n"
        "    optimizer_eval_fn()\n"
        "    _do_sample(_hangproof_epoch, _hangproof_step)\n"
        "    optimizer_train_fn()\n"
        "epoch_to_start, global_step = _hangproof_run.begin("
        "args, train_dataloader, loss_recorder, progress_bar, epoch_to_start, global_step)",
    )
    insert(loop, batches, after="_hangproof_run.epoch_over = True")
    insert(loop, count, after="_hangproof_run.after_step(global_step, epoch, step, loss)")
    insert(loop, record, after="_hangproof_run.after_loss_recorded()")
    batches.iter = ast_utils.parse_expression("_hangproof_run.iterate_batches(train_dataloader, epoch)")
    ast_utils.insert_import(tree, "from sd_scripts_patches.musubi.resume import run as _hangproof_run")
    return tree


PATCH = Patch(
    name="resume",
    why="a resumed run trains all its steps again, from step 0, and changes the order of the images",
    targets=(
        Target(BASE, "NetworkTrainer.train", params=("self", "args"), make=_check_state_first),
        Target(
            BASE,
            "NetworkTrainer._register_hooks_and_resume",
            params=("self", "args", "accelerator", "network"),
            make=_register_hooks,
        ),
        Target(TRAIN_UTILS, "LossRecorder.add", params=("self",)),
        Target(DATASET, "ImageDataset.shuffle_buckets", params=("self",)),
        Target(DATASET, "VideoDataset.shuffle_buckets", params=("self",)),
        Target(DATASET, "glob", beside="ImageDataset", make=lambda _: SortedGlob()),
        *(t for t in resume.PATCH.targets if t.module == "accelerate.accelerator"),
    ),
    rewrites=((Target(BASE, LOOP, params=("self", "args", "accelerator")), rewrite),),
    prepare=prepare,
)
