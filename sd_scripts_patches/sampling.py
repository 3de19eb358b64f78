"""A sample image takes at most its time budget, and its failure never ends the run.

The budget is checked between denoising steps, in the progress bar that the sampling loop of every family iterates over.
An image that exceeds it, or fails for any reason (a prompt file edited during the run, no memory left), is skipped and
reported. sd-scripts restores the random state after the last image; when it fails before that, this patch does. A check
between steps cannot see a single step that hangs: `sample_grace_s` after the budget the process is killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from guards import limits
from sd_scripts_patches import session, timeouts
from sd_scripts_patches.patch import Patch, Target, uses

# module: (function for all images, function for one image); sd-scripts looks both up as globals of one module
FAMILIES = {
    "library.flux_train_utils": ("sample_images", "sample_image_inference"),
    "library.sd3_train_utils": ("sample_images", "sample_image_inference"),
    "library.lumina_train_util": ("sample_images", "sample_image_inference"),
    "library.anima_train_utils": ("sample_images", "_sample_image_inference"),
    "library.train_util": ("sample_images_common", "sample_image_inference"),
}
# module: a function or class beside the denoising loop, whose progress bar is a global of the same module
LOOPS = {
    **{module: names[0] for module, names in FAMILIES.items() if module != "library.train_util"},
    "library.sdxl_lpw_stable_diffusion": "SdxlStableDiffusionLongPromptWeightingPipeline",
}
REQUIRED = ("library.flux_train_utils",)


class BudgetExceeded(Exception):
    """The time budget of the current image is exceeded."""


_end_s = 0.0  # monotonic; 0: no image in progress, or it has no budget
_budget_s = 0.0


def _with_budget(tqdm: Any) -> Any:
    class BudgetedTqdm(tqdm):
        """tqdm that checks the time budget before each step."""

        def __iter__(self) -> Iterator[Any]:
            beat = session.heartbeat()
            for number, item in enumerate(super().__iter__()):
                if _end_s:
                    if time.monotonic() > _end_s:
                        raise BudgetExceeded(
                            f"the budget of {_budget_s:g} s was exceeded after {number} denoising steps"
                        )
                    beat.item(number)
                yield item

    return BudgetedTqdm


def _sample_one(original: Callable) -> Callable:
    def sample_image_inference(*args: Any, **kwargs: Any) -> None:
        global _end_s, _budget_s
        _budget_s = timeouts.seconds("sample_budget_s")
        _end_s = time.monotonic() + _budget_s if _budget_s else 0.0
        kill_s = _budget_s + limits.seconds("sample_grace_s") if _budget_s else 0.0
        what = f"sample image {_prompt_number(args)}"
        devices = [(a, a.device) for a in args if hasattr(a, "decode") and hasattr(a, "device")]
        with session.phase("sample", note=what), session.Deadline(kill_s, f"{what} (one step hangs)"):
            try:
                original(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - a failed sample must not end the run
                session.log(f"{what} skipped: {type(error).__name__}: {error}")
                _restore_models(args, devices)
            finally:
                _end_s = 0.0

    return sample_image_inference


def _sample_all(original: Callable) -> Callable:
    def sample_images(*args: Any, **kwargs: Any) -> None:
        import torch

        state = torch.get_rng_state()
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        try:
            return original(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - nor must a bad prompt file or a missing folder
            session.log(f"sample images skipped: {type(error).__name__}: {error}")
            torch.set_rng_state(state)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)

    return sample_images


def _prompt_number(args: tuple[Any, ...]) -> str:
    """Return the number of the prompt in its file, from 1."""
    prompts = [a for a in args if isinstance(a, dict) and "enum" in a]
    return str(prompts[0]["enum"] + 1) if prompts else ""


def _restore_models(args: tuple[Any, ...], devices: list[tuple[Any, Any]]) -> None:
    """After a skipped image: move the VAE back to its device, prepare swapped blocks for training."""
    for vae, device in devices:
        if vae.device != device:
            vae.to(device)
    for model in args:
        if hasattr(model, "prepare_block_swap_before_forward"):
            model.prepare_block_swap_before_forward()


def _targets() -> tuple[Target, ...]:
    targets = []
    for module, names in FAMILIES.items():
        optional = module not in REQUIRED
        for name, make in zip(names, (_sample_all, _sample_one), strict=True):
            targets.append(Target(module, name, optional=optional, make=make))
    for module, function in LOOPS.items():
        optional = module not in REQUIRED
        targets.append(Target(module, "tqdm", beside=function, optional=optional, make=_with_budget))
    return tuple(targets)


PATCH = Patch(
    name="sampling",
    why="a slow or failing sample image blocks or ends the run",
    targets=_targets(),
    relevant=uses("--sample_prompts", "--sample_every_n_steps", "--sample_every_n_epochs", "--sample_at_first"),
)
