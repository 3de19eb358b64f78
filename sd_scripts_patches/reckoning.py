"""What a state says of itself: whether it can be resumed at all, and where it stands when sd-scripts alone wrote it.

A state of ours knows its place (place.py). One of plain sd-scripts has `train_state.json`, which a second resume leaves
too low (measured: 20 where 30 had been trained), and the LR scheduler's own count, which accelerate restores right.
Refusing early matters: today a state without its JSON starts at step 0 without a word, after minutes of loading.
"""

from __future__ import annotations

import json
import logging
import math
import zipfile
from pathlib import Path

from sd_scripts_patches import place as places
from sd_scripts_patches.place import Place, ResumeError

logger = logging.getLogger(__name__)


def check(folder: Path, step_is_given: bool = False) -> None:
    """Refuse a state that cannot be resumed, before any model is loaded. Raises ResumeError."""
    from guards import checkpoint

    if not folder.is_dir():
        raise ResumeError(f"--resume {folder}: there is no such folder")
    if (folder / checkpoint.GUARD).exists():
        wrong = checkpoint.problems(folder)
        if wrong:
            raise ResumeError(f"--resume {folder}: damaged: {'; '.join(wrong)}; resume from an older state")
    if places.read(folder) is not None or step_is_given:
        return
    path = folder / "train_state.json"
    try:
        _train_state(folder)
    except FileNotFoundError as error:
        raise ResumeError(
            f"{path} is missing: the state does not say at which step it was saved, and sd-scripts would start again at step 0. "
            "Resume from another state, or, if you know the step, add --initial_step N"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResumeError(
            f"{path} is damaged ({error or type(error).__name__}): resume from another state, or, if you know the step, "
            "add --initial_step N"
        ) from error


def _train_state(folder: Path) -> tuple[int, int]:
    """(epoch, step) as sd-scripts wrote them. Raises OSError, ValueError, KeyError, TypeError."""
    data = json.loads((folder / "train_state.json").read_text(encoding="utf-8"))
    epoch, step = data["current_epoch"], data["current_step"]
    if type(epoch) is not int or type(step) is not int or step < 0 or epoch < 0:
        raise ValueError(f"current_epoch {epoch!r}, current_step {step!r}")
    return epoch, step


def given_step(args: object, steps_an_epoch: int) -> int | None:
    """The step that --initial_step or --initial_epoch names."""
    if args.initial_step is not None:
        return args.initial_step
    return None if args.initial_epoch is None else (args.initial_epoch - 1) * steps_an_epoch


def scheduler_steps(accelerator: object) -> int | None:
    """Optimizer steps that the LR scheduler has seen; it is restored right even where the counts are not."""
    for scheduler in accelerator._schedulers:
        count = scheduler.state_dict().get("last_epoch")
        if isinstance(count, int):
            return count // (1 if scheduler.split_batches else accelerator.num_processes)
    return None


def deduce(
    args: object, told: int | None, given: int | None, shape: tuple[int, int, int], scheduler: int | None
) -> Place:
    """The place in a state that unpatched sd-scripts wrote. Says what is unknown.

    told: the step of train_state.json, too low after a second resume; scheduler: steps that the LR scheduler has made,
    too low where fp16 skipped some. So the higher one is right, and `given` by the user is believed.
    """
    folder = Path(args.resume)
    step = given if given is not None else max(told or 0, scheduler or 0)
    place = locate(step, shape, over="-step" not in folder.name, now=None, losses={})
    unknown = ["the average loss"]
    if 0 < place.batch < place.batches:
        unknown.append("the order of the images in this epoch")
    if {told, scheduler} - {step, None}:
        unknown.append(f"the step: train_state.json says {told}, the LR scheduler {scheduler}; {step} is taken")
    if not args.resume_from_huggingface and not zipfile.is_zipfile(folder / "random_states_0.pkl"):
        unknown.append("the random numbers (random_states_0.pkl is missing or damaged)")
    logger.warning(
        f"hangproof: {folder} was saved without hangproof. Unknown, so not as in an undisturbed run: {'; '.join(unknown)}"
    )
    return place


def locate(step: int, shape: tuple[int, int, int], over: bool, now: dict | None, losses: dict) -> Place:
    """The place after `step` steps of epochs of that shape. over: at the end of an epoch, its files have been written."""
    batches, accumulation, processes = shape
    steps_an_epoch = math.ceil(batches / accumulation)
    whole, rest = divmod(step, steps_an_epoch)
    at_end = rest == 0 and whole > 0
    return Place(
        step=step,
        epoch=whole if at_end else whole + 1,
        batch=batches if at_end else min(rest * accumulation, batches),
        epoch_over=at_end and over,
        batches=batches,
        accumulation=accumulation,
        processes=processes,
        workers=0,
        losses=losses,
        now=now,
        known=False,
    )
