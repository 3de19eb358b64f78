"""States that sd-scripts wrote without the patches: whether they can be resumed, and at which step they were saved.

A state of ours holds its own position (trainer_state.py). One of plain sd-scripts has `train_state.json`, whose step a
second resume leaves too low (measured: 20 after 30 trained steps), and the LR scheduler's own count, which accelerate
restores correctly. An early refusal matters: sd-scripts silently starts a state without its JSON at step 0, after
minutes of loading.
"""

from __future__ import annotations

import json
import logging
import math
import zipfile
from pathlib import Path
from typing import Any

from guards import checkpoint
from sd_scripts_patches import trainer_state
from sd_scripts_patches.trainer_state import ResumeError, TrainerState

logger = logging.getLogger(__name__)


def check_state(folder: Path, step_is_given: bool = False) -> TrainerState | None:
    """Refuse a state that cannot be resumed (ResumeError), before a model is loaded; return what our file in it holds."""
    if not folder.is_dir():
        raise ResumeError(f"--resume {folder}: the folder does not exist")
    if (folder / checkpoint.GUARD).exists():
        problems = checkpoint.problems(folder)
        if problems:
            raise ResumeError(f"--resume {folder}: damaged: {'; '.join(problems)}; resume from an older state")
    state = trainer_state.read(folder)
    if state is not None or step_is_given:
        return state
    path = folder / "train_state.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        epoch, step = data["current_epoch"], data["current_step"]
        if type(epoch) is not int or type(step) is not int or step < 0 or epoch < 0:
            raise ValueError(f"current_epoch {epoch!r}, current_step {step!r}")
    except FileNotFoundError as error:
        raise ResumeError(
            f"{path} is missing, so the step of this state is unknown and sd-scripts would restart at step 0. "
            "Resume from another state, or, if you know the step, add --initial_step N"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResumeError(
            f"{path} is damaged ({error or type(error).__name__}). Resume from another state, or, if you know the step, "
            "add --initial_step N"
        ) from error
    return None


def scheduler_steps(accelerator: Any) -> int | None:
    """Return the optimizer steps that the LR scheduler has counted. It is restored correctly in any case."""
    for scheduler in accelerator._schedulers:
        count = scheduler.state_dict().get("last_epoch")
        if isinstance(count, int):
            return count // (1 if scheduler.split_batches else accelerator.num_processes)
    return None


def infer(
    args: Any, json_step: int | None, requested: int | None, shape: tuple[int, int, int], scheduler_step: int | None
) -> TrainerState:
    """Return the position in a state that unpatched sd-scripts wrote, and log what is unknown.

    json_step: the step in train_state.json, too low after a second resume. scheduler_step: the count of the LR
    scheduler, too low when fp16 skipped steps. So the higher one is right, unless the user requested a step.
    """
    folder = Path(args.resume)
    step = requested if requested is not None else max(json_step or 0, scheduler_step or 0)
    state = state_at_step(step, shape, epoch_over="-step" not in folder.name, now=None)
    unknown = ["the average loss"]
    if 0 < state.batch < state.batches:
        unknown.append("the order of the images in this epoch")
    if {json_step, scheduler_step} - {step, None}:
        unknown.append(f"the step: train_state.json has {json_step}, the LR scheduler {scheduler_step}; {step} is used")
    if not args.resume_from_huggingface and not zipfile.is_zipfile(folder / "random_states_0.pkl"):
        unknown.append("the random numbers (random_states_0.pkl is missing or damaged)")
    logger.warning(
        f"hangproof: {folder} was saved without hangproof. These may differ from an uninterrupted run: {'; '.join(unknown)}"
    )
    return state


def state_at_step(step: int, shape: tuple[int, int, int], epoch_over: bool, now: dict[str, Any] | None) -> TrainerState:
    """Return the position after `step` steps. shape: batches per epoch, accumulation, processes.

    epoch_over: at the end of an epoch, its files have been written.
    """
    batches, accumulation, processes = shape
    steps_per_epoch = math.ceil(batches / accumulation)
    epochs, rest = divmod(step, steps_per_epoch)
    at_end = rest == 0 and epochs > 0
    return TrainerState(
        step=step,
        epoch=epochs if at_end else epochs + 1,
        batch=batches if at_end else min(rest * accumulation, batches),
        epoch_over=at_end and epoch_over,
        batches=batches,
        accumulation=accumulation,
        processes=processes,
        workers=0,
        now=now,
        known=False,
    )
