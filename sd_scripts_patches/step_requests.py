"""Requests between two steps of kohya's trainers (guards/step_requests.py): sample images, a checkpoint.

Decision: the trainer's own code does the work. For the step of a request its arguments say that samples or a save by
steps are due, and are put back afterwards; a checkpoint without a LoRA is saved as for a stop. So files, names and
metadata are those of a scheduled save. Random generators are put back after requested samples, so the training is the
same as without them.

kohya's trainers delete only states whose step is a multiple of their interval; the others are deleted here, by the same
rule. The last step is left alone: the training is over, and its own last save follows.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from guards.step_requests import KINDS, StepRequests
from sd_scripts_patches import save, snapshots, trainer_state

_STEP = re.compile(r"-step(\d{8})-state")


class Requests:
    """The requests of one training. `save_state(step)` saves a checkpoint alone."""

    def __init__(self, args: argparse.Namespace, save_state: Callable[[int], None]) -> None:
        self.args = args
        self.save_state = save_state
        self.reader = StepRequests.from_env()
        self.now: tuple[str, ...] = ()  # the kinds that are done at this step, the same on every rank
        self._usual: dict[str, Any] = {}  # arguments that were changed for this step

    def pending(self, step: int) -> tuple[str, ...]:
        """What this rank knows to be requested, for a step that is not the last one."""
        return self.reader.pending(step) if step < self.args.max_train_steps else ()

    def begin(self, kinds: tuple[str, ...], step: int) -> None:
        """The requests of this step, agreed on by all ranks: the trainer's arguments say that they are due."""
        self.now = kinds
        if "sample" in kinds and getattr(self.args, "sample_prompts", None):
            self._change(sample_every_n_steps=1, sample_every_n_epochs=None)
        if "save" in kinds and not self._saves(step):
            self._change(save_every_n_steps=step, save_state=True)

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Around the sample images of a step: when they were requested, all random generators are put back."""
        before = trainer_state.generators() if "sample" in self.now else None
        yield
        if before is not None:
            trainer_state.restore(before)

    def finish(self, step: int, main: bool) -> None:
        """Everything that belongs to the step is complete: save what is left, answer, put the arguments back."""
        kinds, self.now, saved = self.now, (), self._saves(step)
        for name, value in self._usual.items():
            setattr(self.args, name, value)
        self._usual = {}
        if not main:
            return
        for kind in kinds:
            if kind == "sample":
                self._answer_samples(step)
                continue
            if not saved:
                self.save_state(step)
                saved = True
            what = "a checkpoint and its LoRA" if kind == "save" else KINDS[kind]
            snapshots.saves.then("the answer to a request", partial(self.reader.done, kind, step, what))
        if saved:
            self._drop_old(step)

    def _change(self, **values: Any) -> None:
        for name, value in values.items():
            self._usual.setdefault(name, getattr(self.args, name, None))
            setattr(self.args, name, value)

    def _saves(self, step: int) -> bool:
        every = getattr(self.args, "save_every_n_steps", None)
        return every is not None and every > 0 and step % every == 0 and bool(self.args.save_state)

    def _answer_samples(self, step: int) -> None:
        if not getattr(self.args, "sample_prompts", None):
            reason = "the run has no prompts for sample images; add some, then start it again"
            return self.reader.refuse("sample", step, reason)
        found = list(Path(self.args.output_dir, "sample").glob(f"*_{step:06d}_*"))
        if not found:
            return self.reader.refuse("sample", step, "every image was skipped; the log says why")
        self.reader.done("sample", step, f"{len(found)} sample image{'s' * (len(found) != 1)}")

    def _drop_old(self, step: int) -> None:
        """Delete states between the saves by steps that are as old as the ones that the trainer deletes."""
        every = getattr(self.args, "save_every_n_steps", None)
        keep = getattr(self.args, "save_last_n_steps_state", None) or getattr(self.args, "save_last_n_steps", None)
        if not every or keep is None:
            return
        for path in sorted(Path(self.args.output_dir).glob("*-state")):
            match = _STEP.fullmatch(path.name.removeprefix(str(self.args.output_name)))
            if match and int(match[1]) % every and int(match[1]) < step - keep:
                save.rmtree(path)
