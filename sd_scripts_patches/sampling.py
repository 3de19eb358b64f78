"""A sample image costs at most its budget, and never the run.

The budget is checked between denoising steps, in the progress bar that every family's loop iterates over; an image that
exceeds it, or fails for whatever reason (a prompt file edited in mid-run, no memory left), is skipped and reported.
The random state is put back by sd-scripts itself after the last image; where it does not get there, by us. A single
step that hangs is beyond a check between steps: twice the budget ends the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sd_scripts_patches import session, timeouts
from sd_scripts_patches.patch import Patch, Target, wrap

# module: (all images of one occasion, one image); both looked up by sd-scripts as globals of that module
FAMILIES = {
    "library.flux_train_utils": ("sample_images", "sample_image_inference"),
    "library.sd3_train_utils": ("sample_images", "sample_image_inference"),
    "library.lumina_train_util": ("sample_images", "sample_image_inference"),
    "library.anima_train_utils": ("sample_images", "_sample_image_inference"),
    "library.train_util": ("sample_images_common", "sample_image_inference"),
}
LOOPS = (*(m for m in FAMILIES if m != "library.train_util"), "library.sdxl_lpw_stable_diffusion")
NEEDED = ("library.flux_train_utils",)


class TooSlow(Exception):
    """The budget of the image under way is spent."""


_ends_s = 0.0  # monotonic; 0: no image is under way, or it has no budget
_budget_s = 0.0


def apply(module: ModuleType) -> None:
    """Guard the sampling of one family."""
    if module.__name__ in FAMILIES:
        occasion, image = FAMILIES[module.__name__]
        wrap(module, occasion, _occasion)
        wrap(module, image, _image)
    if module.__name__ in LOOPS:
        module.tqdm = _checked(module.tqdm)


def _checked(tqdm: type) -> type:
    class Checked(tqdm):
        """tqdm, which looks at the budget before each step."""

        def __iter__(self):
            beat = session.heartbeat()
            for number, item in enumerate(super().__iter__()):
                if _ends_s:
                    if time.monotonic() > _ends_s:
                        raise TooSlow(f"its budget of {_budget_s:g} s was spent after {number} denoising steps")
                    beat.item(number)
                yield item

    return Checked


def _image(original: Callable) -> Callable:
    def sample_image_inference(*args, **kwargs):
        global _ends_s, _budget_s
        _budget_s = timeouts.seconds("sample_budget_s")
        _ends_s = time.monotonic() + _budget_s if _budget_s else 0.0
        what = f"sample image {_number(args)}"
        devices = [(a, a.device) for a in args if hasattr(a, "decode") and hasattr(a, "device")]
        with session.phase("sample", note=what), session.Deadline(2 * _budget_s, f"{what} (one step hangs)"):
            try:
                original(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - a sample is a picture for people: no failure of it may end the run
                session.say(f"{what} skipped: {type(error).__name__}: {error}")
                _tidy(args, devices)
            finally:
                _ends_s = 0.0

    return sample_image_inference


def _occasion(original: Callable) -> Callable:
    def sample_images(*args, **kwargs):
        import torch

        state = torch.get_rng_state()
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        try:
            return original(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - as above: the prompt file, the folder…
            session.say(f"no samples this time: {type(error).__name__}: {error}")
            torch.set_rng_state(state)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)

    return sample_images


def _number(args: tuple) -> str:
    """Which prompt, by its place in the file."""
    prompts = [a for a in args if isinstance(a, dict) and "enum" in a]
    return str(prompts[0]["enum"] + 1) if prompts else ""


def _tidy(args: tuple, devices: list[tuple[Any, Any]]) -> None:
    """After an image was given up half-way: the VAE back where it was, swapped blocks ready for training."""
    for vae, device in devices:
        if vae.device != device:
            vae.to(device)
    for model in args:
        if hasattr(model, "prepare_block_swap_before_forward"):
            model.prepare_block_swap_before_forward()


def _targets() -> tuple[Target, ...]:
    targets = []
    for module, names in FAMILIES.items():
        targets += [Target(module, name, optional=module not in NEEDED) for name in names]
    return (*targets, *(Target(module, "tqdm", optional=module not in NEEDED) for module in LOOPS))


PATCH = Patch(
    name="sampling",
    why="a slow or failing sample image blocks or ends the run",
    targets=_targets(),
    apply=dict.fromkeys({**FAMILIES, **dict.fromkeys(LOOPS)}, apply),
)
