"""What the run is doing, told from inside: phases, items done in them, every optimizer step with its loss.

The seams are methods that `train()` calls on itself, so they are wrapped on the trainer *instance* when `train` begins:
every family's own override is covered by one binding to `NetworkTrainer`. A step counts as done when `train` calls
`sample_images(…, epoch=None, global_step)`, which it does once an optimizer step, right after counting it; the
heartbeat then carries sd-scripts' own number; once a minute the log gets a line that says the same. Sampling, saving and validation are phases of their own and no part of a
step's duration. A stop is honoured when all that belongs to a step is done (`session.after_batch`), what it saves too.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from guards import crash
from guards.heartbeat import REQUEST_STOP
from sd_scripts_patches import exit as leaving
from sd_scripts_patches import session, timeouts
from sd_scripts_patches.patch import Patch, Target, wrap

TRAINER = "train_network"
UTIL = "library.train_util"
NETWORKS = {
    "networks.lora": "LoRANetwork",
    "networks.lora_flux": "LoRANetwork",
    "networks.lora_sd3": "LoRANetwork",
    "networks.lora_fa": "LoRANetwork",
    "networks.lora_lumina": "LoRANetwork",
    "networks.lora_anima": "LoRANetwork",
    "networks.dylora": "DyLoRANetwork",
    "networks.oft": "OFTNetwork",
    "networks.oft_flux": "OFTNetwork",
}
HASH_BLOCK = 64 << 20

_scheduler: Any = None  # the LR scheduler of this run, as sd-scripts made it
_epoch: Any = None  # the multiprocessing.Value in which train() keeps its epoch


class Loop:
    """One training loop as seen from its seams."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.beat = session.heartbeat()
        self.losses: list = []  # of the micro-batches of the step under way: detached tensors
        self.lr = float("nan")
        self.validated = 0
        self.planned = False
        self.accelerator: Any = None
        self.number = 0  # of the newest optimizer step
        self.step_began_s = self.told_s = time.monotonic()

    def attach(self, trainer: Any) -> None:
        """Put the seams around the trainer's own methods."""
        trainer.process_batch = self.micro_batch(trainer.process_batch)
        trainer.sample_images = self.boundary(trainer.sample_images)
        cache = trainer.cache_text_encoder_outputs_if_needed

        def cache_text_encoder_outputs_if_needed(*args, **kwargs):
            with session.phase("cache_text"):
                return cache(*args, **kwargs)

        trainer.cache_text_encoder_outputs_if_needed = cache_text_encoder_outputs_if_needed
        session.after_batch.append(self.stop_if_asked)

    def micro_batch(self, original: Callable) -> Callable:
        """A forward pass: one micro-batch of a step, or one of validation."""

        def process_batch(*args, **kwargs):
            beat = self.beat
            if not kwargs.get("is_train", True):
                if beat.current_phase != "validate":
                    beat.phase("validate")
                    self.validated = 0
                loss = original(*args, **kwargs)
                self.validated += 1
                beat.item(self.validated)
                return loss
            if beat.current_phase == "validate":
                beat.phase("step")
                self.step_began_s = time.monotonic()
            if not self.planned:
                beat.plan(self.args.max_train_steps)
                self.planned = True
            if not self.losses and _scheduler is not None:
                self.lr = float(_scheduler.get_last_lr()[0])
            loss = original(*args, **kwargs)
            self.losses.append(loss.detach())
            beat.item(len(self.losses))
            return loss

        return process_batch

    def boundary(self, original: Callable) -> Callable:
        """`sample_images`, called at each optimizer step, each epoch, and before the first step."""

        def sample_images(accelerator, args, epoch, global_step, *rest, **kwargs):
            at_step = epoch is None and global_step > 0
            if at_step:
                self.accelerator = accelerator
                self.step(global_step)
            before = self.beat.current_phase
            original(accelerator, args, epoch, global_step, *rest, **kwargs)
            if self.beat.current_phase != before:
                self.beat.phase(before)
            self.step_began_s = time.monotonic()

        return sample_images

    def step(self, number: int) -> None:
        """Optimizer step `number` is done: the mean loss of its micro-batches, and its learning rate."""
        loss = sum(float(x) for x in self.losses) / len(self.losses) if self.losses else float("nan")
        self.losses.clear()
        self.number = number
        now = time.monotonic()
        taken = now - max(self.step_began_s, session.phase_left_s())
        epoch = _epoch.value if _epoch is not None else 0
        self.beat.step(number, epoch=epoch, loss=loss, lr=self.lr)
        session.metrics().step(step=number, epoch=epoch, loss=loss, lr=self.lr, step_s=taken)
        every = timeouts.count("progress_line_s")
        if every and now - self.told_s >= every:
            self.told_s = now
            session.say(
                f"step {number} of {self.args.max_train_steps}, epoch {epoch}, loss {loss:.4g}, {taken:.2f} s a step"
            )
        for function in session.at_step:
            function(number)

    def stop_if_asked(self) -> None:
        """Between two steps: when the monitor has asked for it, save a state of this step and leave; then it does not return."""
        between_steps = self.number and not self.losses
        if not between_steps or self.beat.request != REQUEST_STOP or not self.accelerator.is_main_process:
            return
        session.say(f"asked to stop: saving a state at step {self.number}")
        keep_all = {"save_last_n_steps": None, "save_last_n_steps_state": None, "save_state_to_huggingface": False}
        args = argparse.Namespace(**{**vars(self.args), **keep_all})
        importlib.import_module(UTIL).save_and_remove_state_stepwise(args, self.accelerator, self.number)
        self.beat.end("stopped", f"stopped at step {self.number}")
        leaving.leave_with(crash.EXIT_STOPPED)


def apply_to_trainer(module: ModuleType) -> None:
    """Watch every loop of `NetworkTrainer` and the trainers derived from it."""

    def make(original: Callable) -> Callable:
        def train(self, args):
            session.heartbeat().phase("load")
            Loop(args).attach(self)
            original(self, args)
            session.heartbeat().phase("end")

        return train

    wrap(module, "NetworkTrainer.train", make)


def apply_to_util(module: ModuleType) -> None:
    """Phases of the long silent parts, and the values that `train` keeps in local names."""
    counted = module.tqdm

    class Counted(counted):
        """tqdm, whose every item is a sign of progress."""

        def __iter__(self):
            beat = session.heartbeat()
            for number, item in enumerate(super().__iter__(), 1):
                yield item
                beat.item(number)

    module.tqdm = Counted
    wrap(module, "DatasetGroup.new_cache_latents", _in_phase("cache_latents"))
    wrap(module, "model_hash", _in_phase("hash"))
    wrap(module, "calculate_sha256", _hash)
    for name in ("save_and_remove_state_stepwise", "save_and_remove_state_on_epoch_end", "save_state_on_train_end"):
        wrap(module, name, _in_phase("save"))
    wrap(module, "init_trackers", _then_first_step)
    wrap(module, "get_scheduler_fix", _keep_scheduler)
    wrap(module, "collator_class.__init__", _keep_epoch)


def apply_to_network(module: ModuleType) -> None:
    """Writing a LoRA is saving."""
    wrap(module, f"{NETWORKS[module.__name__]}.save_weights", _in_phase("save"))


def _in_phase(name: str) -> Callable[[Callable], Callable]:
    def make(original: Callable) -> Callable:
        def inside(*args, **kwargs):
            with session.phase(name):
                return original(*args, **kwargs)

        return inside

    return make


def _hash(original: Callable) -> Callable:
    """The same digest, with a sign of life every 64 MiB: the model has tens of gigabytes."""

    def calculate_sha256(filename):
        try:
            file = open(filename, "rb")  # noqa: SIM115 - what cannot be opened is the original's to answer
        except OSError:
            return original(filename)
        digest, read = hashlib.sha256(), 0
        with file, session.phase("hash", note=str(filename)) as beat:
            while block := file.read(HASH_BLOCK):
                digest.update(block)
                read += 1
                beat.item(read)
        return digest.hexdigest()

    return calculate_sha256


def _then_first_step(original: Callable) -> Callable:
    def init_trackers(*args, **kwargs):
        original(*args, **kwargs)
        session.heartbeat().phase("first_step")

    return init_trackers


def _keep_scheduler(original: Callable) -> Callable:
    def get_scheduler_fix(*args, **kwargs):
        global _scheduler
        _scheduler = original(*args, **kwargs)
        return _scheduler

    return get_scheduler_fix


def _keep_epoch(original: Callable) -> Callable:
    def __init__(self, epoch, step, dataset):
        global _epoch
        _epoch = epoch
        original(self, epoch, step, dataset)

    return __init__


PATCH = Patch(
    name="heartbeat",
    why="silence: nobody can tell a long phase from a hang",
    targets=(
        Target(TRAINER, "NetworkTrainer.train", params=("self", "args")),
        Target(TRAINER, "NetworkTrainer.process_batch", params=("self", "batch")),
        Target(TRAINER, "NetworkTrainer.sample_images", params=("self", "accelerator", "args", "epoch", "global_step")),
        Target(TRAINER, "NetworkTrainer.cache_text_encoder_outputs_if_needed", params=("self", "args")),
        Target(UTIL, "tqdm"),
        Target(UTIL, "DatasetGroup.new_cache_latents", params=("self", "model", "accelerator")),
        Target(UTIL, "model_hash", params=("filename",)),
        Target(UTIL, "calculate_sha256", params=("filename",)),
        Target(UTIL, "save_and_remove_state_stepwise", params=("args", "accelerator", "step_no")),
        Target(UTIL, "save_and_remove_state_on_epoch_end", params=("args", "accelerator", "epoch_no")),
        Target(UTIL, "save_state_on_train_end", params=("args", "accelerator")),
        Target(UTIL, "init_trackers", params=("accelerator", "args", "default_tracker_name")),
        Target(UTIL, "get_scheduler_fix", params=("args", "optimizer", "num_processes")),
        Target(UTIL, "collator_class.__init__", params=("self", "epoch", "step", "dataset")),
        *(Target(m, f"{c}.save_weights", params=("self", "file"), optional=True) for m, c in NETWORKS.items()),
    ),
    apply={TRAINER: apply_to_trainer, UTIL: apply_to_util, **dict.fromkeys(NETWORKS, apply_to_network)},
)
