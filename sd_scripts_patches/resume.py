"""A resumed run goes on as the undisturbed one would have: counts, file names, LR, averages, data order, noise.

Today (sd-scripts 0.10.1, measured) `global_step` restarts at 0 or at the remainder in the epoch and is written into
the next state, so a second resume repeats steps; a state without its JSON starts at 0 without a word; the order of
the batches changes. Related reports: kohya_ss#2771, sd-scripts#1999, #2248, #2407.

`train()` keeps all of that in local variables, out of reach of a wrapper. So eight statements of its syntax tree get
a neighbour that tells us or asks us (`rewrite`), each found by what it says and refused where it is not there exactly
once. The rest is here: `Run` follows the run, writes its `Place` (place.py) into each state, and puts it back.

The batches of a resumed epoch are those of the first one: the generators are set to what they were when the epoch
began, so that the same order and the same worker seeds are drawn. Workers then read the batches that were trained
already and drop them, since their own random numbers (flips, crops, tags) cannot be had otherwise; without workers
the loader skips them unread and the generators are set by hand before each of the two reads that straddle the save.
Out of reach: the random numbers of workers that stay from epoch to epoch (`--persistent_data_loader_workers`); the order
holds there, flips and shuffled tags do not.
"""

from __future__ import annotations

import ast
import glob
import importlib
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from sd_scripts_patches import order, reckoning, session, trees
from sd_scripts_patches import place as places
from sd_scripts_patches.patch import Patch, Target, find_function, wrap
from sd_scripts_patches.place import Place, ResumeError

MODULE = "train_network"
UTIL = "library.train_util"
AT_FIRST = "self.sample_images(accelerator, args, 0, global_step"
LOCALS = (
    *(
        "args",
        "accelerator",
        "train_dataloader",
        "skipped_dataloader",
        "loss_recorder",
        "progress_bar",
        "steps_from_state",
    ),
    *("current_epoch", "current_step", "epoch_to_start", "num_train_epochs", "initial_step", "global_step"),
    *("epoch", "step", "batch", "loss"),
)
"""What `train()` calls the things that the seams hand over."""
logger = logging.getLogger(__name__)


class Run:
    """The run of this process. step, planned: optimizer steps done, to do; epoch: from 1; batch: batches done in it."""

    def __init__(self) -> None:
        self.step = self.epoch = self.batch = self.planned = 0
        self.epoch_over = False
        self.accelerator = self.args = self.loader = self.recorder = self.current_step = None
        self.pending: tuple[int, int, object] | None = None  # epoch index, step, loss: not yet in the averages
        self.epoch_start: dict | None = None
        self.fetch: dict | None = None
        self.found: Place | None = None  # as read from the state
        self.resumed: Place | None = None  # where to go on, until that epoch has begun
        self.replay: Place | None = None
        self.order: str | None = None  # what the order of the epoch about to begin is to be drawn from
        self.fill = False

    # The seams, in the order in which train() comes to them.

    def watch(self, accelerator: object) -> None:
        """Before the state is loaded: have each state that is loaded or saved carry its place."""
        self.accelerator = accelerator
        accelerator.register_load_state_pre_hook(lambda models, folder: self._found(Path(folder)))
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: self._write(Path(folder)))

    def loaded(self, args: object, steps_from_state: int | None, loader: object) -> int | None:
        """After it: take over from sd-scripts' own reckoning, which gets None. Raises ResumeError."""
        if not args.resume:
            return steps_from_state
        shape = (len(loader), args.gradient_accumulation_steps, self.accelerator.num_processes)
        given = reckoning.given_step(args, math.ceil(shape[0] / shape[1]))
        place = self.found
        if place is None:
            place = reckoning.deduce(args, steps_from_state, given, shape, reckoning.scheduler_steps(self.accelerator))
            place.now = places.to_json(places.generators())  # accelerate has just restored them
        elif given is not None and given != place.step:
            raise ResumeError(
                f"{args.resume} was saved after step {place.step}, but --initial_step or --initial_epoch says {given}: "
                "leave them out, a state knows its step; to train anew from its weights use --network_weights instead"
            )
        elif shape != (place.batches, place.accumulation, place.processes):
            names = ("batches an epoch", "gradient accumulation", "processes")
            was = (place.batches, place.accumulation, place.processes)
            changed = [f"{n} {a}, now {b}" for n, a, b in zip(names, was, shape, strict=True) if a != b]
            logger.warning(
                f"hangproof: resumed in another shape ({'; '.join(changed)}): step {place.step} holds, the epoch and the "
                "order of the images are counted anew"
            )
            place = reckoning.locate(place.step, shape, over=False, now=place.now, losses={})
        args.initial_epoch = args.initial_step = None
        args.skip_until_initial_step = False
        args.sample_at_first = False  # that was step 0
        self.resumed = place
        return None

    def samples_due(self, args: object) -> tuple[int, int]:
        """(epoch, step) for the look at `--sample_at_first`: an epoch whose state was saved and whose samples a kill has cost."""
        place = self.resumed
        if place is None or not place.epoch_over or not args.sample_prompts or not args.sample_every_n_epochs:
            return 0, 0
        name = f"{glob.escape(args.output_name)}_" if args.output_name else ""
        drawn = list(Path(args.output_dir, "sample").glob(f"{name}e{place.epoch:06d}_*.png"))
        try:
            prompts = importlib.import_module(UTIL).load_prompts(args.sample_prompts)
        except (OSError, ValueError) as error:
            logger.warning(f"hangproof: no look for lost samples: {args.sample_prompts}: {error}")
            return 0, 0
        return (place.epoch, place.step) if len(drawn) < len(prompts) else (0, 0)

    def begin(
        self,
        args: object,
        loader: object,
        recorder: object,
        progress_bar: object,
        current_step: object,
        epoch_to_start: int,
        global_step: int,
    ) -> tuple[int, int]:
        """Before the first epoch: (index of the epoch to start with, global step)."""
        self.args, self.loader, self.recorder, self.current_step = args, loader, recorder, current_step
        self.step, self.planned = global_step, args.max_train_steps
        sampler_owner = order.innermost(loader.batch_sampler)
        sampler_owner.sampler = order.Watched(sampler_owner.sampler, self._drawing, self._fetching)
        place = self.resumed
        if place is None:
            return epoch_to_start, global_step
        if place.workers != loader.num_workers and place.known:
            logger.warning(
                f"hangproof: resumed with {loader.num_workers} loader workers instead of {place.workers}: the first images of each "
                "epoch change places (each worker begins with the order of another one); flips, crops, shuffled tags are drawn anew"
            )
        self.step = progress_bar.initial = progress_bar.n = place.step
        current_step.value = max(place.step - 1, 0)
        progress_bar.refresh()
        if place.losses:
            recorder.loss_list, recorder.loss_total = list(place.losses["list"]), place.losses["total"]
        self.fill = not place.losses
        # Should no epoch be left, what is saved at the end is this very place again.
        self.epoch, self.batch, self.epoch_over = place.epoch, place.batch, place.epoch_over
        self.epoch_start = place.epoch_start
        index = place.epoch if place.epoch_over and place.batch >= place.batches else place.epoch - 1
        if index == place.epoch:
            place.batch, place.epoch = 0, place.epoch + 1
        # Buckets are shuffled when the first batch of an epoch has been read: it still has the order of the epoch before.
        # A worker that is started anew each epoch begins unshuffled, and so does ours; one that stays had that order too.
        behind = place.epoch if place.batch and not loader.num_workers else place.epoch - 1
        if loader.num_workers == 0 or loader.persistent_workers:
            loader.dataset.set_current_epoch(behind)
        missing = places.restore(places.from_json(place.now))
        if missing:
            logger.warning(f"hangproof: no random state for {', '.join(missing)} in the state: its noise will differ")
        logger.info(
            f"hangproof: resuming after step {place.step} of {self.planned}, epoch {index + 1}, batch {place.batch}"
        )
        return index, self.step

    def batches(self, loader: object, epoch: int) -> Iterator[tuple[int, object]]:
        """What the loop over an epoch's batches iterates: (step, batch). epoch: its index."""
        place, self.resumed = self.resumed, None
        self.epoch, self.batch, self.epoch_over, self.fetch = epoch + 1, 0, False, None
        if place is not None and self.step >= self.planned:
            self.batch, self.epoch_start = place.batch, place.epoch_start
            return
        if place is not None and place.batch:
            iterator = self._continued(loader, place)
        else:
            self.epoch_start = order.epoch_start(loader)
            if place is not None and place.epoch > 1 and loader.persistent_workers:
                self.order = self.epoch_start["torch"]
            iterator = enumerate(loader)
        for step, batch in iterator:
            self.batch = step + 1
            yield step, batch
            for function in session.after_batch:
                function()

    def stepped(self, step: int, epoch: int, batch: int, loss: object) -> None:
        """An optimizer step is done; its loss is in the averages only after whatever is saved now."""
        self.step, self.pending = step, (epoch, batch, loss)

    def recorded(self) -> None:
        """The loss has gone into the averages."""
        self.pending = None
        if self.fill and self.recorder.loss_list:  # a state without averages: start from the first loss, not from zeros
            count = len(self.recorder.loss_list)
            self.recorder.loss_list = [self.recorder.loss_list[-1]] * count
            self.recorder.loss_total = math.fsum(self.recorder.loss_list)
        self.fill = False

    # What they need.

    @property
    def epochs_done(self) -> int:
        """Epochs of which every batch has been trained."""
        return self.epoch if self.loader is not None and self.batch >= len(self.loader) else max(self.epoch - 1, 0)

    def place(self) -> Place:
        """Where the run is now."""
        fetch = self.fetch if self.fetch and self.fetch["position"] == self.batch else None
        return Place(
            step=self.step,
            epoch=self.epoch,
            batch=self.batch,
            epoch_over=self.epoch_over,
            batches=len(self.loader),
            accumulation=self.args.gradient_accumulation_steps,
            processes=self.accelerator.num_processes,
            workers=self.loader.num_workers,
            losses=self._losses(),
            now=places.to_json(places.generators()),
            epoch_start=self.epoch_start,
            fetch=fetch and {**fetch, "generators": places.to_json(fetch["generators"])},
        )

    def _found(self, folder: Path) -> None:
        self.found = places.read(folder)

    def _write(self, folder: Path) -> None:
        if self.loader is not None:
            places.write(folder, self.place())

    def _losses(self) -> dict:
        """The averages, with a loss that LossRecorder.add has not been given yet put in as it will do."""
        losses, total = list(self.recorder.loss_list), self.recorder.loss_total
        if self.pending is not None:
            epoch, step, loss = self.pending
            value = loss.detach().item()
            if epoch == 0:
                losses.append(value)
            else:
                losses += [0.0] * (step + 1 - len(losses))
                total -= losses[step]
                losses[step] = value
            total += value
        return {"list": losses, "total": total}

    def _continued(self, loader: object, place: Place) -> Iterator[tuple[int, object]]:
        """The rest of an epoch of which `place.batch` batches have been trained."""
        done = place.batch
        self.batch, self.epoch_start = done, place.epoch_start
        if done >= len(loader):
            return
        if place.epoch_start is None:
            logger.warning(
                f"hangproof: the order of this epoch's last {len(loader) - done} batches is unknown: drawn anew"
            )
            self.epoch_start = order.epoch_start(loader)
        else:
            order.set_epoch_start(loader, place.epoch_start)
            self.order = place.epoch_start["order"]
        if loader.num_workers and place.epoch_start is not None:
            logger.info(f"hangproof: reading past {done} batches of this epoch")
            iterator = iter(loader)
            for number in range(1, done + 1):
                next(iterator)
                session.heartbeat().item(number)
        else:
            self.replay = place if place.fetch is not None and not loader.num_workers else None
            iterator = iter(self.accelerator.skip_first_batches(loader, done))
        by_hand = self.replay is not None
        first = next(iterator)
        if self.replay is not None or not by_hand:  # else _fetching has done it, between the two reads
            places.restore(places.from_json(place.now))
            self.replay = None
        yield done, first
        yield from enumerate(iterator, done + 1)

    def _drawing(self) -> None:
        """The order of an epoch is about to be drawn. Before it, the seed of the workers was; but not for workers that have
        stayed from the epoch before, as they had in the run that is resumed and have not yet in this process."""
        import torch

        if self.order is not None:
            torch.set_rng_state(places.unpack(self.order))
        self.epoch_start["order"], self.order = places.pack(torch.get_rng_state()), None

    def _fetching(self, position: int) -> None:
        """The loader is about to read the batch at `position` of this epoch. With workers that is ahead of time: ignored;
        with several processes each reads only some positions, and `now` has to do."""
        if self.loader.num_workers or self.accelerator.num_processes > 1:
            return
        if self.replay is not None:
            if position < self.replay.batch:
                return
            if position == self.replay.batch:
                fetch = self.replay.fetch
                places.restore(places.from_json(fetch["generators"]))
                self.loader.dataset.set_current_step(fetch["dataset_step"])
                self.current_step.value = fetch["current_step"]
            else:
                places.restore(places.from_json(self.replay.now))
                self.current_step.value = max(self.replay.step - 1, 0)
                self.replay = None
        self.fetch = {
            "position": position,
            "generators": places.generators(devices=False),
            "dataset_step": order.dataset_step(self.loader.dataset),
            "current_step": self.current_step.value,
        }


run = Run()


def apply(module: ModuleType) -> None:
    """Look at the state that `--resume` names before anything is loaded."""

    def make(original: Callable) -> Callable:
        def train(self, args):
            if args.resume and not args.resume_from_huggingface:
                reckoning.check(Path(args.resume), args.initial_step is not None or args.initial_epoch is not None)
            return original(self, args)

        return train

    wrap(module, "NetworkTrainer.train", make)


def rewrite(tree: ast.Module) -> ast.Module:
    """Put the seams into `train()`. Raises DoesNotFit where a statement is not there exactly once."""
    train = find_function(tree, "NetworkTrainer.train")
    trees.require(train, LOCALS)
    resume = trees.find_statement(train, ast.Expr, "train_util.resume_from_local_or_hf_if_specified(accelerator, args)")
    at_first = trees.find_statement(train, ast.Expr, AT_FIRST, prefix=True)
    epochs = trees.find_statement(train, ast.For, "for epoch in range(epoch_to_start, num_train_epochs)")
    batches = trees.find_statement(
        epochs, ast.For, "for (step, batch) in enumerate(skipped_dataloader or train_dataloader)"
    )
    count = trees.find_statement(batches, ast.AugAssign, "global_step += 1")
    record = trees.find_statement(batches, ast.Expr, "loss_recorder.add(", prefix=True)
    trees.insert(
        train,
        resume,
        before="_hangproof_run.watch(accelerator)",
        after="steps_from_state = _hangproof_run.loaded(args, steps_from_state, train_dataloader)",
    )
    at_first.value.args[2:4] = [ast.parse("*_hangproof_run.samples_due(args),").body[0].value.elts[0]]
    trees.insert(
        train,
        epochs,
        before="epoch_to_start, global_step = _hangproof_run.begin("
        "args, train_dataloader, loss_recorder, progress_bar, current_step, epoch_to_start, global_step)",
    )
    trees.insert(train, batches, after="_hangproof_run.epoch_over = True")
    trees.insert(train, count, after="_hangproof_run.stepped(global_step, epoch, step, loss)")
    trees.insert(train, record, after="_hangproof_run.recorded()")
    batches.iter = ast.parse("_hangproof_run.batches(skipped_dataloader or train_dataloader, epoch)", mode="eval").body
    train.body[:0] = trees.statements("from sd_scripts_patches.resume import run as _hangproof_run")
    return tree


PATCH = Patch(
    name="resume",
    why="a resumed run restarts its counts, repeats steps, and changes the order of images",
    targets=(
        Target(MODULE, "NetworkTrainer.train", params=("self", "args")),
        Target(UTIL, "resume_from_local_or_hf_if_specified", params=("accelerator", "args")),
        Target(UTIL, "load_prompts", params=("prompt_file",)),
        Target(UTIL, "LossRecorder.add", params=("self",)),
        Target(UTIL, "DatasetGroup.set_current_step", params=("self", "step")),
        Target(UTIL, "BaseDataset.set_current_epoch", params=("self", "epoch")),
        Target("accelerate.accelerator", "Accelerator.register_load_state_pre_hook", params=("self", "hook")),
        Target("accelerate.accelerator", "Accelerator.register_save_state_pre_hook", params=("self", "hook")),
        Target(
            "accelerate.accelerator", "Accelerator.skip_first_batches", params=("self", "dataloader", "num_batches")
        ),
    ),
    apply={MODULE: apply},
    rewrite={MODULE: rewrite},
)
