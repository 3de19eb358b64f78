"""A sample image takes at most its time budget, and its failure never ends the run.

The budget is checked between denoising steps, in the progress bar that the sampling loop of every family moves.
An image that exceeds it, or fails for any reason (a prompt file edited during the run, no memory left), is skipped and
reported. sd-scripts restores the random state after the last image; when it fails before that, this patch does. A check
between steps cannot see a single step that hangs: `sample_grace_s` after the budget the process is killed.

After a failure, a model may be in evaluation mode and its swapped blocks placed for inference (musubi-tuner, Anima,
HunyuanImage); both are restored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from guards import limits
from sd_scripts_patches import session, trainer_state
from sd_scripts_patches.musubi import BASE
from sd_scripts_patches.patch import Patch, Target, around, function, uses

# module: (function for all images, function for one image); both are globals of one module, where they call each other
FAMILIES = {
    "library.flux_train_utils": ("sample_images", "sample_image_inference"),
    "library.sd3_train_utils": ("sample_images", "sample_image_inference"),
    "library.lumina_train_util": ("sample_images", "sample_image_inference"),
    "library.anima_train_utils": ("sample_images", "_sample_image_inference"),
    "hunyuan_image_train_network": ("sample_images", "sample_image_inference"),
    "library.train_util": ("sample_images_common", "sample_image_inference"),
}
REQUIRED = ("library.flux_train_utils",)
COMPLETE = {".png": b"IEND\xaeB`\x82", ".mp4": b"moov"}
"""What is written last into a sample of this type."""


class BudgetExceeded(Exception):
    """The time budget of the current image is exceeded."""


_end_s = 0.0  # monotonic; 0: no image in progress, or it has no budget
_budget_s = 0.0
_thread = 0  # that makes the image
_before: list[dict[str, Any]] = []  # the random generators before the first image


@around
def _before_each(original: Callable, self: Any) -> Iterator[Any]:
    for number, item in enumerate(original(self)):
        _check_budget(number)
        yield item


@around
def _after_update(original: Callable, self: Any, n: float | None = 1) -> bool | None:
    """A bar without an iterable is moved by its loop, after each step."""
    shown: bool | None = original(self, n)
    if self.iterable is None and self.n < (self.total or 0):
        _check_budget(self.n)
    return shown


def _check_budget(number: float) -> None:
    """Report `number` denoising steps of an image. Raises BudgetExceeded."""
    if not _end_s or _thread != threading.get_ident():
        return
    if time.monotonic() > _end_s:
        raise BudgetExceeded(f"the budget of {_budget_s:g} s was exceeded after {number} denoising steps")
    session.heartbeat().item(int(number))


@around
def _sample_one(original: Callable, *args: Any, **kwargs: Any) -> None:
    global _end_s, _budget_s, _thread
    prompts = _prompts(args)
    if not _before:
        _before.append(trainer_state.generators())
    if _drawn(args, prompts):
        return
    _budget_s = limits.seconds("sample_budget_s") * max(len(prompts), 1)  # Lumina makes several in one loop
    _thread, _end_s = threading.get_ident(), time.monotonic() + _budget_s if _budget_s else 0.0
    kill_s = _budget_s + limits.seconds("sample_grace_s") if _budget_s else 0.0
    what = f"sample image {', '.join(str(prompt['enum'] + 1) for prompt in prompts)}".rstrip()
    devices = [(a, a.device) for a in args if hasattr(a, "decode") and hasattr(a, "device")]
    modes = [(a, a.training) for a in args if hasattr(a, "training")]
    with session.phase("sample", note=what), session.Deadline(kill_s, f"{what} (one step hangs)"):
        try:
            original(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a failed sample must not end the run
            session.log(f"{what} skipped: {type(error).__name__}: {error}")
            _restore_models(args, devices, modes)
        finally:
            _end_s = 0.0


@around
def _sample_all(original: Callable, *args: Any, **kwargs: Any) -> None:
    _before.clear()
    try:
        return original(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - nor must a bad prompt file or a missing folder
        session.log(f"sample images skipped: {type(error).__name__}: {error}")
        if _before:
            trainer_state.restore(_before[0])
        for model in (*args, *kwargs.values()):
            unwrapped = getattr(model, "module", model)  # of DistributedDataParallel
            if hasattr(unwrapped, "switch_block_swap_for_training"):
                unwrapped.switch_block_swap_for_training()


def _prompts(args: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return the prompts among the arguments: the one of an image, or those of the images of one loop.

    `enum` is the prompt's number in its file, from 0.
    """
    flat = [entry for a in args for entry in (a if isinstance(a, (list, tuple)) else [a])]
    return [entry for entry in flat if isinstance(entry, dict) and isinstance(entry.get("enum"), int)]


def sample_files(args: Any, when: str) -> list[Path]:
    """The sample images and videos whose names go on with `when` after the LoRA's name. What a kill cut off goes."""
    name = f"{glob.escape(args.output_name)}_" if args.output_name else ""
    found = list(Path(args.output_dir, "sample").glob(f"{name}{when}_*"))
    for path in found:
        with contextlib.suppress(OSError):
            if COMPLETE.get(path.suffix, b"") not in path.read_bytes():
                path.unlink()
    return [path for path in found if path.exists()]


def _drawn(args: tuple[Any, ...], prompts: list[dict[str, Any]]) -> bool:
    """Whether a killed process has drawn these images since the state from which this one goes on."""
    options = next((a for a in args if hasattr(a, "output_name")), None)
    if session.run is None or options is None or not prompts:
        return False
    holds = [any(one is prompts[0] for one in (a if isinstance(a, (list, tuple)) else [a])) for a in args]
    place = holds.index(True)
    match args[place + 1 : place + 3]:
        case (None, int(step)):
            when = f"{step:06d}"
        case (int(epoch), _):
            when = f"e{epoch:06d}"
        case _:
            return False
    for prompt in prompts:
        files = sample_files(options, f"{when}_{prompt['enum']:02d}")
        if not any(path.stat().st_mtime > session.run.since_s for path in files):
            return False
    return True


def _restore_models(args: tuple[Any, ...], devices: list[tuple[Any, Any]], modes: list[tuple[Any, bool]]) -> None:
    """After a skipped image: move the VAE back to its device, set the modes of the models, prepare swapped blocks."""
    for vae, device in devices:
        vae.to(device)
    for model, training in modes:
        model.train(training)
    for model in args:
        if hasattr(model, "prepare_block_swap_before_forward"):
            model.prepare_block_swap_before_forward()


STEPS = (
    function("tqdm.std", "tqdm.__iter__(self)", _before_each),
    function("tqdm.std", "tqdm.update(self, n)", _after_update),
)
"""Where every denoising loop passes, whatever its family."""

PATCH = Patch(
    name="sampling",
    why="a slow or failing sample image blocks or ends the run",
    targets=(
        *STEPS,
        *(
            Target(module, name, optional=module not in REQUIRED, make=make)
            for module, names in FAMILIES.items()
            for name, make in zip(names, (_sample_all, _sample_one), strict=True)
        ),
    ),
    relevant=uses("--sample_prompts", "--sample_every_n_steps", "--sample_every_n_epochs", "--sample_at_first"),
)
MUSUBI = dataclasses.replace(
    PATCH,
    targets=(
        function(BASE, "NetworkTrainer.sample_images(self, accelerator, args, epoch, steps)", _sample_all),
        function(BASE, "NetworkTrainer.sample_image_inference(self, accelerator, args, transformer)", _sample_one),
        *STEPS,
    ),
)
