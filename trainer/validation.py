"""Held-out images: which ones are not trained on, and their loss at fixed noise.

The loss of a training step jumps with its image, its noise and its noise level, so it does not show whether the LoRA
still improves. The loss of images that are never trained on, always with the same noise at the same levels, changes
only with the weights. It is computed without gradients and with random numbers of its own, so training is the same with
and without it: a run with held-out images gives the LoRA of a run that lacks them.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from trainer import cache
from trainer.data_order import seed_for
from trainer.dataset import Image
from trainer.errors import TrainError

# noise levels of each image, those of sd-scripts (train_network.py, validation_timesteps)
LEVELS = (0.2, 0.4, 0.6, 0.8)


def split(images: list[Image], share: float, seed: int) -> tuple[list[Image], list[Image]]:
    """(the images to train on, the held-out ones), both in their order. A share of 0 holds none out.

    Of each folder the share is rounded, as sd-scripts does; one image at least is held out. Which ones depends on the
    seed and their names alone. An image that several data sets use is held out of all.

    Raises: TrainError when an image would have to be both.
    """
    if not share:
        return images, []
    folders: dict[Path, list[Path]] = defaultdict(list)
    for path in sorted({image.path for image in images}):
        folders[path.parent].append(path)
    held: set[Path] = set()
    ranked = {
        folder: sorted(paths, key=lambda p: seed_for(seed, "held out", p.name)) for folder, paths in folders.items()
    }
    for paths in ranked.values():
        held |= set(paths[: round(len(paths) * share)])
    if not held:
        held = {max(ranked.values(), key=len)[0]}
    kept = [image for image in images if image.path not in held]
    if not kept:
        raise TrainError(f"--validation_split {share:g}: no image is left to train on; add images, or lower the share")
    return kept, [image for image in images if image.path in held]


class Validator:
    """Computes the loss of the held-out images. paths: their caches, whose names seed the noise."""

    def __init__(self, args, family, paths: cache.Paths, device, dtype):
        self.args, self.family, self.device, self.dtype = args, family, device, dtype
        self.names, self.batches = [path.name for path in paths.latents], cache.Batches(paths)
        self.seed = args.seed if args.validation_seed is None else args.validation_seed

    @property
    def items(self) -> int:
        """Losses of one validation: of each image, one at each noise level."""
        most = self.args.max_validation_steps
        return len(LEVELS) * (min(len(self.names), most) if most else len(self.names))

    def due(self, step: int, epoch_done: int | None, total: int) -> bool:
        """Whether a validation is due after a step: before the first, at the interval, and after the last.

        epoch_done: the epoch (1-based) that ends with this step; None when none does.
        """
        if not self.names:
            return False
        if step in (0, total):
            return True
        if self.args.validate_every_n_steps:
            return step % self.args.validate_every_n_steps == 0
        return epoch_done is not None and epoch_done % (self.args.validate_every_n_epochs or 1) == 0

    def loss(
        self, transformer, hb, autocast: Callable[[], AbstractContextManager], stop: Callable[[], bool]
    ) -> float | None:
        """The mean loss over all held-out images and noise levels; None when `stop` asks to end before that."""
        import torch

        from trainer import flow

        losses: list[float] = []
        hb.phase("validate", total=self.items)
        for number in range(self.items // len(LEVELS)):
            batch = self.batches[((number, 0),)]
            for level in LEVELS:
                if stop():
                    return None
                seed = seed_for(self.seed, "validation", self.names[number], level)
                with torch.no_grad(), autocast():
                    one = flow.loss_of(
                        self.args, self.family, transformer, batch, seed, self.device, self.dtype, level=level
                    )
                losses.append(float(one))
                hb.item(len(losses))
        return sum(losses) / len(losses)
