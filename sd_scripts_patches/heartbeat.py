"""Reports what the run is doing: phases, items done in a phase, and every optimizer step with its loss.

`train()` calls methods on itself, so these are wrapped on the trainer *instance* when `train` starts: one binding to
`NetworkTrainer` covers the overrides of every family. A step counts as done when `train` calls `sample_images(…,
epoch=None, global_step)`, which it does once per optimizer step, right after counting it. The heartbeat carries
sd-scripts' own step number, and once a minute the log gets a line with it. Sampling, saving and validation are phases
of their own and no part of a step's duration. A stop request is honored when everything that belongs to a step is
complete (`session.on_batch_end`), saves included.

The check points of the start are reached in methods that `train` calls in this order: tokenizer, data, accelerator,
model, (data again: caches), network, loader, ready, tracker, ready again, first step.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from guards import crash
from guards.heartbeat import REQUEST_STOP, WAITS
from guards.step_requests import KINDS
from sd_scripts_patches import batch_seeds, exit as exit_patch, hooks, session, snapshots, timeouts
from sd_scripts_patches.patch import Patch, around, function
from sd_scripts_patches.save import SAVES
from sd_scripts_patches.step_requests import Requests

TRAINER = "train_network"
ACCELERATOR = "accelerate.accelerator"
UTIL = "library.train_util"
LOADER = "torch.utils.data.dataloader"
HASH_BLOCK = 64 << 20
COUNTED = ("load", "cache_latents", "cache_text")
"""The phases in which items are counted."""

_scheduler: Any = None  # the LR scheduler of this run, as sd-scripts created it
_epoch: Any = None  # the multiprocessing.Value in which train() keeps its epoch

POINTS = {
    "get_tokenize_strategy": ("tokenizer", "", ""),
    "get_latents_caching_strategy": ("data", "", ""),
    "load_target_model": ("model", "", ""),
    "load_unet_lazily": ("model", "network", ""),
    "cache_text_encoder_outputs_if_needed": ("data", "network", "cache_text"),
    "prepare_unet_with_accelerator": ("ready", "", ""),
}
"""Method of the trainer -> the check points that begin with it and after it, and its phase ("": none)."""


def at_point(before: str = "", after: str = "", phase: str = "", then: str = "") -> Callable[[Callable], Callable]:
    """A wrapper for a function that begins check point `before` and runs in `phase`; `after` and phase `then` follow.

    Tokenizers are downloaded by the first process of a machine, then read by the others.
    """

    def begins(original: Callable, *args: Any, **kwargs: Any) -> Any:
        beat = session.heartbeat()
        beat.reach(before)
        if _training is not None:  # a state of the end of an epoch says that its validation is over
            _training.record_validation()
        with session.phase(phase) if phase else contextlib.nullcontext():
            result = original(*args, **kwargs)
        if then:
            beat.phase(then)
        beat.reach(after)
        return result

    return around(begins)


@around
def describe_accelerator(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Record the device and the backend of the process group once they are known."""
    beat = session.heartbeat()
    beat.reach("accelerator")
    accelerator = original(*args, **kwargs)
    from torch import distributed

    backend = distributed.get_backend() if distributed.is_available() and distributed.is_initialized() else ""
    beat.describe(str(accelerator.device), backend)
    return accelerator


@around
def _loader_begins(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """The training's data loader is the first one that is made once the network is there."""
    beat = session.heartbeat()
    if beat.point == "network":
        beat.reach("loader")
    original(self, *args, **kwargs)


def agree(accelerator: Any, losses: list[float], flags: Sequence[bool]) -> tuple[float, list[bool]]:
    """Return the mean loss of a step over the batches of all ranks, which all call it, and which flags one has set."""
    values = [sum(losses), float(len(losses)), *map(float, flags)]
    if accelerator is not None and accelerator.num_processes > 1:
        import torch

        own = torch.tensor(values, device=accelerator.device, dtype=torch.float64)
        values = accelerator.reduce(own, reduction="sum").tolist()
    total, count, *found = values
    return total / count if count else math.nan, [value > 0 for value in found]


class TrainingLoop:
    """One call of `train()`, followed through the methods that it calls."""

    util, points = UTIL, POINTS
    """The module that saves states, and the check points that methods of the trainer reach."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.beat = session.heartbeat()
        self.losses: list[Any] = []  # detached tensors: one per micro-batch of the current step
        self.lr = math.nan
        self.validation_losses: list[Any] = []  # of the validation under way, or of one that is not recorded yet
        self.planned = False
        self.accelerator: Any = None
        self.step = 0  # the newest completed optimizer step
        self.stop = False  # after that step a stop had been requested, of this rank or of another one
        self.requests = Requests(args, self.save_state)
        self.step_start_s = self.last_line_s = time.monotonic()

    def attach(self, trainer: Any) -> None:
        """Wrap the trainer's own methods."""
        trainer.process_batch = around(self.process_batch)(trainer.process_batch)
        trainer.sample_images = around(self.sample_images)(trainer.sample_images)
        for name, row in self.points.items():
            if hasattr(trainer, name):
                setattr(trainer, name, at_point(*row)(getattr(trainer, name)))
        session.on_batch_end.append(self.record_validation)
        session.on_batch_end.append(self.honor_requests)
        snapshots.attach(self)

    def process_batch(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """A forward pass: one micro-batch of a step, or one batch of validation."""
        beat = self.beat
        if not kwargs.get("is_train", True):
            if beat.current_phase != "validate":
                beat.phase("validate")
            loss = original(*args, **kwargs)
            self.validation_losses.append(loss.detach())
            beat.item(len(self.validation_losses))
            return loss
        self.record_validation()
        if beat.current_phase == "validate":
            beat.phase("step")
            self.step_start_s = time.monotonic()
        if not self.planned:
            beat.plan(self.args.max_train_steps)
            self.planned = True
        if not self.losses and _scheduler is not None:
            self.lr = float(_scheduler.optimizer.param_groups[0]["lr"])  # some have no get_last_lr()
        result = original(*args, **kwargs)
        loss, *rest = result if isinstance(result, tuple) else (result,)  # musubi-tuner: and its metrics
        if batch_seeds.repeated():
            loss = loss * 0  # no gradient, and no part in the mean
        else:
            self.losses.append(loss.detach())
        beat.item(len(self.losses))
        return (loss, *rest) if isinstance(result, tuple) else loss

    def sample_images(
        self, original: Callable, accelerator: Any, args: Any, epoch: Any, global_step: int, *rest: Any, **kwargs: Any
    ) -> None:
        """Called after each optimizer step, after each epoch, and before the first step."""
        if epoch is None and global_step > 0:
            self.accelerator = accelerator
            self.record_step(global_step)
        before = self.beat.current_phase
        with self.requests.sampling():
            original(accelerator, args, epoch, global_step, *rest, **kwargs)
        if self.beat.current_phase != before:
            self.beat.phase(before)
        if epoch == global_step == 0:  # --sample_at_first, called in any case
            self.beat.reach("first_step")
        self.step_start_s = time.monotonic()

    def record_step(self, step: int) -> None:
        """Optimizer step `step` is complete: record the mean loss of its micro-batches and its learning rate."""
        losses = [float(loss) for loss in self.losses]
        self.losses.clear()
        self.step = step
        requested = self.requests.pending(step)
        flags = [self.beat.request == REQUEST_STOP, *(kind in requested for kind in KINDS)]
        loss, (self.stop, *agreed) = agree(self.accelerator, losses, flags)
        self.requests.begin(tuple(kind for kind, due in zip(KINDS, agreed, strict=True) if due), step)
        now = time.monotonic()
        step_s = now - max(self.step_start_s, session.nested_phase_end_s)
        epoch = _epoch.value if _epoch is not None else 0
        self.beat.step(step, epoch=epoch, loss=loss, lr=self.lr)
        session.metrics().step(step=step, epoch=epoch, loss=loss, lr=self.lr, step_s=step_s)
        every_s = timeouts.count("progress_line_s")
        if every_s and now - self.last_line_s >= every_s:
            self.last_line_s = now
            session.log(
                f"step {step} of {self.args.max_train_steps}, epoch {epoch}, loss {loss:.4g}, {step_s:.2f} s per step"
            )
        saves = getattr(self.args, "save_every_n_steps", None)
        if self.beat.rank and saves and step % saves == 0:  # until its next step is complete
            self.beat.phase("save", note=f"{WAITS} 0, which saves")
        self.step_start_s = time.monotonic()

    def record_validation(self) -> None:
        """Record the mean of the validation that has just ended; nothing without one.

        sd-scripts' own average is that of all validations of the first epoch together (LossRecorder.add). With several
        GPUs it is the mean of rank 0's share of the held-out images, which is the same share at each validation.
        """
        if not self.validation_losses:
            return
        losses = [float(loss) for loss in self.validation_losses]
        self.validation_losses.clear()
        mean = sum(losses) / len(losses)
        epoch = _epoch.value if _epoch is not None else 0
        resumed = session.run.step if session.run is not None else 0
        step = self.step or resumed  # it resumed at the end of an epoch
        session.metrics().validation(step, epoch, mean, len(losses))
        session.log(f"validation loss at step {step}: {mean:.5g}")

    def save_state(self, step: int, why: str = "a checkpoint is requested") -> None:
        """Save a state that no flag asks for, with the name of a save by steps. It deletes no other one."""
        session.log(f"{why}: saving a state at step {step}")
        keep_all = {"save_last_n_steps": None, "save_last_n_steps_state": None, "save_state_to_huggingface": False}
        args = argparse.Namespace(**{**vars(self.args), **keep_all})
        hooks.current(self.util, "save_and_remove_state_stepwise")(args, self.accelerator, step)

    def honor_requests(self) -> None:
        """Between two steps: do what is requested. When that is a stop, save a state of this step and exit."""
        if not self.step or self.losses:
            return
        main = not self.beat.rank
        if not main and {"save", "state"} & {*self.requests.now}:
            self.beat.phase("save", note=f"{WAITS} 0, which saves")
        self.requests.finish(self.step, main)
        several = self.accelerator.num_processes > 1
        if not (self.stop if several else self.beat.request == REQUEST_STOP):
            return
        if main:
            self.save_state(self.step, "stop requested")
            snapshots.saves.wait()
        elif several:
            self.beat.phase("save", note="waiting for rank 0")
        if several:  # the launcher kills all ranks when the first one exits
            self.accelerator.wait_for_everyone()
        exit_patch.exit_process(crash.EXIT_STOPPED, "stopped", f"stopped at step {self.step}")


_training: TrainingLoop | None = None


def after_step(step: int) -> None:
    """Optimizer step `step` has been counted. Called from the training loop of musubi-tuner."""
    if _training is not None:
        _training.record_step(step)


def follow(kind: type[TrainingLoop]) -> Callable[[Callable], Callable]:
    """Follow every training loop of `NetworkTrainer` and of the trainers derived from it."""

    def train(original: Callable, self: Any, args: argparse.Namespace) -> None:
        global _training
        session.heartbeat().phase("load")
        session.heartbeat().reach("folders")
        _training = kind(args)
        _training.attach(self)
        with snapshots.saves:
            original(self, args)
        _training.record_validation()
        session.heartbeat().phase("end")

    return around(train)


@around
def _in_phase_end(original: Callable, self: Any) -> None:
    """The trackers finish in phase "end": in phase "step" that would look like a hung step."""
    session.heartbeat().phase("end")
    session.heartbeat().reach("finished")
    original(self)


@around
def _count_items(original: Callable, self: Any) -> Iterator[Any]:
    """Every item of a loop with a progress bar is progress while the run loads or makes caches."""
    beat = session.heartbeat()
    for number, item in enumerate(original(self), 1):
        yield item
        if beat.current_phase in COUNTED:
            beat.item(number)


@around
def _hash_with_progress(original: Callable, filename: str) -> str:
    """The same digest, with progress reported every 64 MiB: a model has tens of gigabytes."""
    try:
        file = open(filename, "rb")  # noqa: SIM115 - the original handles a file that cannot be opened
    except OSError:
        return original(filename)
    digest, read = hashlib.sha256(), 0
    with file, session.phase("hash", note=str(filename)) as beat:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
            read += 1
            beat.item(read)
    return digest.hexdigest()


@around
def _keep_scheduler(original: Callable, *args: Any, **kwargs: Any) -> Any:
    global _scheduler
    _scheduler = original(*args, **kwargs)
    return _scheduler


@around
def _keep_epoch(original: Callable, self: Any, epoch: Any, *rest: Any) -> None:
    global _epoch
    _epoch = epoch
    original(self, epoch, *rest)


PATCH = Patch(
    name="heartbeat",
    why="without progress reports a long phase looks like a hang",
    targets=(
        function(TRAINER, "NetworkTrainer.train(self, args)", follow(TrainingLoop)),
        function(TRAINER, "NetworkTrainer.process_batch(self, batch)"),
        function(TRAINER, "NetworkTrainer.sample_images(self, accelerator, args, epoch, global_step)"),
        function(TRAINER, "NetworkTrainer.cache_text_encoder_outputs_if_needed(self, args)"),
        function("tqdm.std", "tqdm.__iter__(self)", _count_items),
        function(
            UTIL, "DatasetGroup.new_cache_latents(self, model, accelerator)", at_point("data", phase="cache_latents")
        ),
        function(UTIL, "model_hash(filename)", at_point(phase="hash")),
        function(UTIL, "calculate_sha256(filename)", _hash_with_progress),
        *(function(UTIL, save, at_point(phase="save")) for save in SAVES),
        function(
            UTIL,
            "init_trackers(accelerator, args, default_tracker_name)",
            at_point("tracker", "ready", then="first_step"),
        ),
        function(UTIL, "prepare_accelerator(args)", describe_accelerator),
        function(LOADER, "DataLoader.__init__(self, dataset, batch_size, shuffle)", _loader_begins),
        function(ACCELERATOR, "Accelerator.end_training(self)", _in_phase_end),
        function(UTIL, "get_scheduler_fix(args, optimizer, num_processes)", _keep_scheduler),
        function(UTIL, "collator_class.__init__(self, epoch, step, dataset)", _keep_epoch),
    ),
)
