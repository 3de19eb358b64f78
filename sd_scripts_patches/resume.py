"""A resumed run continues as the uninterrupted one: counts, file names, LR, averages, data order, noise.

sd-scripts 0.10.1 (measured) restarts `global_step` at 0 or at the remainder in the epoch and writes it into the next
state, so a second resume repeats steps; it silently starts a state without its JSON at step 0; and it changes the order
of the batches. Related reports: kohya_ss#2771, sd-scripts#1999, #2248, #2407.

`train()` keeps all of that in local variables, out of reach of a wrapper. So statements are inserted into its syntax
tree (train_loop.py) that pass these variables to `Run` and take values from it. Each place is found by the source of a
statement, and the patch is refused when that statement is not there exactly once. `Run` follows the run, writes a
`TrainerState` (trainer_state.py) into each state folder, and restores it.

The batches of a resumed epoch are those of the interrupted one: the generators are set to their state at the start of
the epoch, so the same order and the same worker seeds are drawn. Workers then read the batches that were already
trained and drop them, because their own random numbers (flips, crops, tags) cannot be restored otherwise. Without
workers the loader skips these batches unread, and the generators are set before each of the two reads around the save.
One limit: workers that stay from epoch to epoch (`--persistent_data_loader_workers`) keep the order, but not the flips
and shuffled tags.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from guards import checkpoint, snapshot_files, world
from sd_scripts_patches import (
    batch_seeds,
    data_order,
    hooks,
    legacy_state,
    sampling,
    save,
    session,
    snapshots,
    train_loop,
    trainer_state,
)
from sd_scripts_patches.patch import Patch, around, function
from sd_scripts_patches.trainer_state import ResumeError, TrainerState

MODULE = "train_network"
UTIL = "library.train_util"
logger = logging.getLogger(__name__)


class Run:
    """The run of this process. step, planned: optimizer steps completed, to do; epoch: from 1; batch: done in it."""

    def __init__(self) -> None:
        self.step = self.epoch = self.batch = self.planned = 0
        self.epoch_over = False
        self.accelerator: Any = None
        self.args: Any = None
        self.loader: Any = None
        self.recorder: Any = None
        self.current_step: Any = None
        self.requested: int | None = None  # by --initial_step or --initial_epoch
        self.pending_loss: tuple[int, int, Any] | None = None  # epoch index, step, loss: not yet in the averages
        self.epoch_start: dict[str, Any] | None = None
        self.fetch: dict[str, Any] | None = None
        self.loaded: TrainerState | None = None  # as read from the state folder
        self.since_s = math.inf  # when that was saved: a sample image that is newer need not be drawn again
        self.rates: list[Any] = []  # of this run, by group of parameters
        self.settings: list[dict[str, Any]] = []  # of each optimizer, before its first step
        self.beside: list[tuple[Any, str]] = []  # what the network keeps beside its trained weights
        self.resume_from: TrainerState | None = None  # until the resumed epoch has started
        self.replay: TrainerState | None = None  # set while the generators are set before single reads
        self.logs = ""  # the name of the folder of logs, of the first attempt
        self.order: str | None = None  # the generator from which the order of the next epoch is drawn
        self.fill_losses = False

    # Called from train(), in this order.

    def register_hooks(self, accelerator: Any) -> None:
        """Before the state is loaded: each state that is loaded or saved includes a TrainerState."""
        self.accelerator = accelerator
        self.settings = [trainer_state.numbers(one.optimizer) for one in accelerator._optimizers]
        trained = {id(weight) for group in self._groups() for weight in group["params"]}
        for model in accelerator._models:
            self.beside += trainer_state.beside_weights(model, trained)
        accelerator.register_load_state_pre_hook(lambda models, folder: self._load(Path(folder)))
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: self._save(Path(folder)))

    def after_load(self, args: Any, steps_from_state: int | None, loader: Any) -> int | None:
        """After the state is loaded: replace sd-scripts' own count, which gets None. Raises ResumeError."""
        shape = (len(loader), args.gradient_accumulation_steps, self.accelerator.num_processes)
        requested = args.initial_step
        if requested is None and args.initial_epoch is not None:
            requested = (args.initial_epoch - 1) * math.ceil(shape[0] / shape[1])
        self.requested = requested
        if not args.resume:
            return steps_from_state
        self.keep_rates()
        state = self.loaded
        if state is None:
            scheduler_step = legacy_state.scheduler_steps(self.accelerator)
            state = legacy_state.infer(args, steps_from_state, requested, shape, scheduler_step)
            state.now = trainer_state.generators()  # accelerate has just restored them
        elif requested not in (None, state.step, state.extra.get("requested")):  # the last: the run began with it
            raise ResumeError(
                f"{args.resume} was saved after step {state.step}, but --initial_step or --initial_epoch names step "
                f"{requested}. Remove these flags: a state holds its step. To start a new training from its weights, use "
                "--network_weights"
            )
        else:
            state = _in_shape(state, shape)
        args.initial_epoch = args.initial_step = None
        args.skip_until_initial_step = False
        args.sample_at_first = False  # that was before step 1
        self.resume_from = state
        return None

    def missing_samples(self, args: Any) -> tuple[int, int]:
        """Return (epoch, step) for `--sample_at_first`: the epoch whose state is there and whose samples a kill lost."""
        state = self.resume_from
        if state is None or not state.epoch_over or not args.sample_prompts or not args.sample_every_n_epochs:
            return 0, 0
        try:
            prompts = hooks.current(UTIL, "load_prompts")(args.sample_prompts)
        except (OSError, ValueError) as error:
            logger.warning(f"hangproof: cannot check for missing samples: {args.sample_prompts}: {error}")
            return 0, 0
        found = sampling.sample_files(args, f"e{state.epoch:06d}")
        return (state.epoch, state.step) if len(found) < len(prompts) else (0, 0)

    def finished(self, args: Any) -> bool:
        """Whether the state is that of the end: nothing is left but to save its LoRA once more."""
        state = self.resume_from
        return state is not None and state.epoch_over and state.step >= args.max_train_steps

    def begin_training(
        self,
        args: Any,
        loader: Any,
        recorder: Any,
        progress_bar: Any,
        current_step: Any,
        epoch_to_start: int,
        global_step: int,
    ) -> tuple[int, int]:
        """Before the first epoch: return (index of the epoch to start with, global step)."""
        self.args, self.loader, self.recorder, self.current_step = args, loader, recorder, current_step
        self.step, self.planned = global_step, args.max_train_steps
        batch_seeds.begin_training(loader)
        owner = data_order.innermost_batch_sampler(loader.batch_sampler)
        owner.sampler = data_order.ObservedSampler(owner.sampler, self._on_order, self._on_position)
        state = self.resume_from
        snapshots.complete_saves(args.output_dir, state.step if state is not None else global_step)
        if state is None:
            return epoch_to_start, global_step
        if state.workers != loader.num_workers and state.known:
            logger.warning(
                f"hangproof: resumed with {loader.num_workers} loader workers instead of {state.workers}: the first images "
                "of each epoch change places (each worker starts with the order of another one); flips, crops and shuffled "
                "tags are drawn again"
            )
        if (planned := state.extra.get("planned", self.planned)) != self.planned:
            logger.info(
                f"hangproof: the run has {self.planned} steps instead of {planned}: the learning rate goes on as in a run "
                f"of {self.planned} steps, so with a schedule such as cosine the result differs from one"
            )
        self.step = progress_bar.initial = progress_bar.n = state.step
        current_step.value = max(state.step - 1, 0)
        progress_bar.refresh()
        if state.losses:
            recorder.loss_list, recorder.loss_total = list(state.losses["list"]), state.losses["total"]
        self.fill_losses = not state.losses
        # If no epoch is left, the state that is saved at the end is this one again.
        self.epoch, self.batch, self.epoch_over = state.epoch, state.batch, state.epoch_over
        self.epoch_start, self.fetch = state.epoch_start, state.fetch
        if not world.rank():
            save.finish_deletions(args, self.step, self.epochs_done)
        index = state.epoch - 1
        if state.batch >= state.batches or self.finished(args):  # the next batch is the first of the next epoch
            index += state.epoch_over  # else what follows the batches of this one is left
            state.batch, state.epoch = 0, state.epoch + 1
        self._shuffle(loader, state)
        if missing := trainer_state.restore(state.now):
            logger.warning(f"hangproof: the state has no generator for {', '.join(missing)}: its noise will differ")
        logger.info(
            f"hangproof: resuming after step {state.step} of {self.planned}, epoch {state.epoch}, batch {state.batch}"
        )
        return index, self.step

    def validation_is_left(self, args: Any) -> bool:
        """Whether a kill lost the validation of the resumed step: it follows the save, and is in each snapshot."""
        every = args.validate_every_n_steps
        due = self.resume_from is not None and not self.epoch_over and bool(every) and self.step % every == 0
        return due and not snapshot_files.is_restored(args.resume)

    def iterate_batches(self, loader: Any, epoch: int) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) for the loop over an epoch's batches. epoch: its index."""
        state = self.resume_from
        if state is not None and (self.step >= self.planned or epoch + 1 < state.epoch):
            return  # no batch of this epoch is left, only what follows them
        self.resume_from = None
        self.epoch, self.batch, self.epoch_over, self.fetch = epoch + 1, 0, False, None
        iterator: Iterator[tuple[int, Any]]
        if state is not None and state.batch:
            iterator = self._rest_of_epoch(loader, state)
        else:
            self._begin_epoch(loader, epoch, resumed=state is not None)
            iterator = enumerate(loader)
        skipped = len(self.loader) - len(loader)  # with --skip_until_initial_step, in the first epoch
        for step, batch in iterator:
            self.batch = skipped + step + 1
            batch_seeds.begin_batch(self.args.seed, epoch, skipped + step, self.accelerator)
            yield step, batch
            for follow_up in session.on_batch_end:
                follow_up()

    def after_step(self, step: int, epoch: int, batch: int, loss: Any) -> None:
        """An optimizer step is complete. Its loss enters the averages only after the saves of this step."""
        self.step, self.pending_loss = step, (epoch, batch, loss)

    def after_loss_recorded(self) -> None:
        """The loss has entered the averages."""
        self.pending_loss = None
        if self.fill_losses and self.recorder.loss_list:  # the state has no averages: as the first loss, not 0
            count = len(self.recorder.loss_list)
            self.recorder.loss_list = [self.recorder.loss_list[-1]] * count
            self.recorder.loss_total = math.fsum(self.recorder.loss_list)
        self.fill_losses = False

    # What depends on the trainer's data set.

    def _shuffle(self, loader: Any, state: TrainerState) -> None:
        """Give the data set the order that it has in epoch `state.epoch`.

        Buckets are shuffled after the first batch of an epoch has been read, so that batch has the order of the previous
        epoch. Workers that start anew each epoch begin unshuffled, here too; workers that stay had that order as well.
        """
        if loader.num_workers == 0 or loader.persistent_workers:
            loader.dataset.set_current_epoch(state.epoch if state.batch and not loader.num_workers else state.epoch - 1)
            # The step at which it was read last, on which token_warmup_step depends. Of workers it is not known.
            data_order.set_dataset_step(loader.dataset, state.extra.get("dataset_step", state.step))

    def _extra(self) -> dict[str, Any]:
        step = {} if self.loader.num_workers else {"dataset_step": data_order.dataset_step(self.loader.dataset)}
        return {"seed": self.args.seed, "requested": self.requested, "planned": self.planned, "logs": self.logs} | step

    # Helpers.

    @property
    def epochs_done(self) -> int:
        """Epochs whose batches have all been trained."""
        return self.epoch if self.loader is not None and self.batch >= len(self.loader) else max(self.epoch - 1, 0)

    def current_state(self) -> TrainerState:
        """Return the state of the run now."""
        return TrainerState(
            step=self.step,
            epoch=self.epoch,
            batch=self.batch,
            epoch_over=self.epoch_over,
            batches=len(self.loader),
            accumulation=self.args.gradient_accumulation_steps,
            processes=self.accelerator.num_processes,
            workers=self.loader.num_workers,
            losses=self._losses(),
            now=trainer_state.generators(),
            epoch_start=self.epoch_start,
            fetch=self.fetch if self.fetch and self.fetch["position"] == self.batch else None,
            extra={**self._extra(), "type": self._type(), "numbers": self._numbers()},
        )

    def _load(self, folder: Path) -> None:
        self.loaded = trainer_state.read(folder)
        with contextlib.suppress(OSError):  # kohya's trainers alone write no guard file
            self.since_s = (folder / checkpoint.GUARD).stat().st_mtime
        trainer_state.read_beside(folder, self.beside)
        self.rates = [_rate(group) for group in self._groups()]
        extra = self.loaded.extra if self.loaded is not None else {}
        self.logs = Path(str(extra.get("logs", ""))).name  # it may come from a store
        optimizers = [one.optimizer for one in self.accelerator._optimizers]
        for optimizer in optimizers:
            trainer_state.allow_types(optimizer, folder)
            if extra.get("type") == self._type():
                trainer_state.keep_types(optimizer)
        for optimizer, numbers in zip(optimizers, extra.get("numbers", ()), strict=False):
            vars(optimizer).update(numbers)

    def _groups(self) -> list[dict[str, Any]]:
        """The groups of parameters of this run."""
        return [group for optimizer in self.accelerator._optimizers for group in optimizer.param_groups]

    def _numbers(self) -> list[dict[str, Any]]:
        """The numbers that each optimizer has changed beside its state."""
        found = [trainer_state.numbers(one.optimizer) for one in self.accelerator._optimizers]
        return [dict(now.items() - was.items()) for now, was in zip(found, self.settings, strict=False)]

    def _type(self) -> str:
        """The type of the weights that are trained."""
        return next((str(parameter.dtype) for group in self._groups() for parameter in group["params"]), "")

    def keep_rates(self) -> None:
        """After a state is loaded, which replaced them: the learning rates of this run, at this point of its schedule."""
        known = [(group, now, _rate(group)) for group, now in zip(self._groups(), self.rates, strict=False)]
        known = [one for one in known if not one[0].get("relative_step")]  # Adafactor computes its own at each step
        changed = [(group, now, was) for group, now, was in known if now and was and now != was]
        for group, now, was in changed:
            logger.info(f"hangproof: resumed with learning rate {now:g} instead of {was:g}")
            group["lr"] *= now / was
            if "initial_lr" in group:
                group["initial_lr"] = now
        for scheduler in [one.scheduler for one in self.accelerator._schedulers]:
            by_step = type(scheduler).__name__ == "LambdaLR"  # all of transformers' but Adafactor's own
            if not (changed or by_step):
                continue
            groups = scheduler.optimizer.param_groups
            scheduler.base_lrs = [_rate(group) for group in groups]
            if by_step:
                for group, factor in zip(groups, scheduler.lr_lambdas, strict=True):
                    group["lr"] = _rate(group) * factor(scheduler.last_epoch)
            scheduler._last_lr = [group["lr"] for group in groups]

    def _save(self, folder: Path) -> None:
        if self.loader is not None:
            trainer_state.write(folder, self.current_state())
            trainer_state.write_beside(folder, self.beside)

    def _losses(self) -> dict[str, Any]:
        """Return the averages, including a loss that LossRecorder.add has not received yet."""
        losses, total = list(self.recorder.loss_list), self.recorder.loss_total
        if self.pending_loss is not None:
            epoch, step, loss = self.pending_loss
            value = loss.detach().item()
            if epoch == 0:
                losses.append(value)
            else:
                losses += [0.0] * (step + 1 - len(losses))
                total -= losses[step]
                losses[step] = value
            total += value
        return {"list": losses, "total": total}

    def _begin_epoch(self, loader: Any, epoch: int, resumed: bool) -> None:
        """Before the iterator of an epoch whose order is drawn now. resumed: it is the first one of a resumed run."""
        batch_seeds.begin_epoch(self.args.seed, epoch)
        self.epoch_start = data_order.capture(loader)
        if resumed and epoch and loader.persistent_workers:
            self.order = self.epoch_start["torch"]

    def _rest_of_epoch(self, loader: Any, state: TrainerState) -> Iterator[tuple[int, Any]]:
        """Yield the rest of an epoch of which `state.batch` batches have been trained."""
        done = state.batch
        if state.epoch_start is None:
            if not batch_seeds.by_batch():
                logger.warning(
                    f"hangproof: the order of the last {len(loader) - done} batches of this epoch is unknown; it is drawn again"
                )
            self._begin_epoch(loader, state.epoch - 1, resumed=True)
        else:
            self.epoch_start = state.epoch_start
            data_order.restore(loader, state.epoch_start)
            self.order = state.epoch_start["order"]
        if loader.num_workers:
            logger.info(f"hangproof: reading and dropping the {done} batches of this epoch that were trained before")
            iterator = iter(loader)
            for number in range(1, done + 1):
                next(iterator)
                session.heartbeat().item(number)
        else:
            self.replay = state if state.fetch is not None else None
            iterator = iter(self.accelerator.skip_first_batches(loader, done))
        replaying = self.replay is not None
        first = next(iterator)
        if self.replay is not None or not replaying:  # else _on_position has done it, between the two reads
            self._end_replay(state)
        yield done, first
        yield from enumerate(iterator, done + 1)

    def _end_replay(self, state: TrainerState) -> None:
        """From here on, batches are read as after the save: a validation may have changed the step of the data set."""
        trainer_state.restore(state.now)
        self.current_step.value = max(state.step - 1, 0)
        if not self.loader.num_workers:
            data_order.set_dataset_step(self.loader.dataset, state.extra.get("dataset_step", state.step))
        self.replay = None

    def _on_order(self) -> None:
        """The order of an epoch is about to be drawn. The seed of the workers was drawn before it, except for workers that
        stayed from the epoch before: they had stayed in the interrupted run and have just started in this process."""
        import torch

        if self.order is not None:
            torch.set_rng_state(trainer_state.unpack(self.order))
        assert self.epoch_start is not None
        self.epoch_start["order"], self.order = trainer_state.pack(torch.get_rng_state()), None

    def _on_position(self, position: int) -> None:
        """The loader is about to read the batch at `position` of this epoch. Ignored with workers, which read ahead of
        time, and with several processes, each of which reads only some positions: there `now` is used."""
        if self.loader.num_workers or self.accelerator.num_processes > 1:
            return
        if self.replay is not None:
            if position < self.replay.batch:
                return
            fetch = self.replay.fetch
            if position == self.replay.batch and fetch is not None:
                trainer_state.restore(fetch["generators"])
                data_order.set_dataset_step(self.loader.dataset, fetch["dataset_step"])
                self.current_step.value = fetch["current_step"]
            else:
                self._end_replay(self.replay)
        self.fetch = {
            "position": position,
            "generators": trainer_state.generators(devices=False),
            "dataset_step": data_order.dataset_step(self.loader.dataset),
            "current_step": self.current_step.value,
        }


def _in_shape(state: TrainerState, shape: tuple[int, int, int]) -> TrainerState:
    """Return the state for a run of `shape` (batches per epoch, accumulation, processes)."""
    was = (state.batches, state.accumulation, state.processes)
    if shape == was:
        return state
    names = ("batches per epoch", "gradient accumulation", "processes")
    changed = [f"{n} {a}, now {b}" for n, a, b in zip(names, was, shape, strict=True) if a != b]
    logger.warning(
        f"hangproof: resumed with other settings ({'; '.join(changed)}): step {state.step} is kept, the epoch and "
        "the order of the images are computed from it"
    )
    return legacy_state.state_at_step(state.step, shape, epoch_over=False, now=state.now)


def _rate(group: dict[str, Any]) -> Any:
    """The learning rate of a group of parameters, which its schedule multiplies."""
    return group.get("initial_lr", group["lr"])


run = session.run = Run()


@around
def _check_state_first(original: Callable, self: Any, args: Any) -> Any:
    """Check the state that `--resume` names before anything is loaded. Without --seed, the state's seed is the run's."""
    state = None
    if args.resume and not args.resume_from_huggingface:
        try:
            snapshot_files.restore(args.resume)
        except snapshot_files.SnapshotError as error:
            raise ResumeError(f"--resume {args.resume}: {error}") from error
        # musubi-tuner has no such flags, and finds the step of a state without them.
        flags = (getattr(args, name, 0) for name in ("initial_step", "initial_epoch"))
        step_is_given = any(flag is not None for flag in flags)
        state = legacy_state.check_state(Path(args.resume), step_is_given)
    if args.seed is None:
        args.seed = state.extra.get("seed") if state is not None else None
    if args.seed is None:
        args.seed = batch_seeds.of_all_ranks()
    return original(self, args)


@around
def _unwrap_compiled(original: Callable, self: Any, model: Any, *rest: Any, **kwargs: Any) -> Any:
    """Return the model in a compiled one, too. kohya's hooks keep the weights of this type in a state: with
    --torch_compile or --dynamo_backend it had none, and each resume trained a new LoRA."""
    return original(self, model, *rest, **{"keep_torch_compile": False, **kwargs})


_TRAIN = function(MODULE, "NetworkTrainer.train(self, args)", _check_state_first)

PATCH = Patch(
    name="resume",
    why="a resumed run restarts its counts, repeats steps, and changes the order of the images",
    targets=(
        _TRAIN,
        function(UTIL, "resume_from_local_or_hf_if_specified(accelerator, args)"),
        function(UTIL, "load_prompts(prompt_file)"),
        function(UTIL, "LossRecorder.add(self)"),
        function(UTIL, "DatasetGroup.set_current_step(self, step)"),
        function(UTIL, "BaseDataset.set_current_epoch(self, epoch)"),
        function("accelerate.accelerator", "Accelerator.register_load_state_pre_hook(self, hook)"),
        function("accelerate.accelerator", "Accelerator.register_save_state_pre_hook(self, hook)"),
        function("accelerate.accelerator", "Accelerator.skip_first_batches(self, dataloader, num_batches)"),
        function(
            "accelerate.accelerator",
            "Accelerator.unwrap_model(self, model, keep_fp32_wrapper, keep_torch_compile)",
            _unwrap_compiled,
        ),
    ),
    rewrites=((_TRAIN, train_loop.rewrite),),
)
