"""Where the order of an epoch's batches comes from, and how to see it drawn.

The sampler draws its seed, and the loader its base seed, from torch's default generator when an epoch's iterator is made.
So an order is kept as the state of that generator, and drawn again from it; `Watched` tells when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sd_scripts_patches import place as places
from sd_scripts_patches.place import ResumeError


class Watched:
    """A sampler that says when it is about to draw an order, and which position it is about to give out."""

    def __init__(self, inner: object, drawing: Callable[[], None], fetching: Callable[[int], None]) -> None:
        self.inner, self.drawing, self.fetching = inner, drawing, fetching

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[int]:
        self.drawing()
        for position, index in enumerate(self.inner):
            self.fetching(position)
            yield index

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def innermost(batch_sampler: object) -> object:
    """The batch sampler that holds the sampler of indices; with several processes others are wrapped around it."""
    while not hasattr(batch_sampler, "sampler") and hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    if not hasattr(batch_sampler, "sampler"):
        raise ResumeError(
            f"the training loader has no sampler of indices ({type(batch_sampler).__name__}): cannot follow its order"
        )
    return batch_sampler


def epoch_start(loader: object) -> dict:
    """What the order of an epoch and the seeds of its workers are about to be drawn from."""
    import torch

    generator = getattr(innermost(loader.batch_sampler).sampler, "generator", None)
    return {
        "torch": places.pack(torch.get_rng_state()),
        "sampler": places.pack(generator.get_state()) if generator else None,
    }


def set_epoch_start(loader: object, start: dict) -> None:
    import torch

    torch.set_rng_state(places.unpack(start["torch"]))
    generator = getattr(innermost(loader.batch_sampler).sampler, "generator", None)
    if generator is not None and start["sampler"]:
        generator.set_state(places.unpack(start["sampler"]))


def dataset_step(dataset: object) -> int:
    return getattr(dataset, "datasets", [dataset])[0].current_step
