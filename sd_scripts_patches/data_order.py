"""The order of an epoch's batches: where it comes from, and how to capture and restore it.

The sampler draws its seed, and the loader its base seed, from torch's default generator when the iterator of an epoch
is created. So an order is stored as the state of that generator and drawn again from it. `ObservedSampler` reports when
an order is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sd_scripts_patches import trainer_state
from sd_scripts_patches.trainer_state import ResumeError


class ObservedSampler:
    """A sampler that reports, right before it happens, that an order is drawn and that a position is returned."""

    def __init__(self, inner: Any, on_order: Callable[[], None], on_position: Callable[[int], None]) -> None:
        self.inner, self.on_order, self.on_position = inner, on_order, on_position

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[int]:
        self.on_order()
        for position, index in enumerate(self.inner):
            self.on_position(position)
            yield index

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def innermost_batch_sampler(batch_sampler: Any) -> Any:
    """Return the batch sampler that holds the sampler of indices; several processes have others around it."""
    while not hasattr(batch_sampler, "sampler") and hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    if not hasattr(batch_sampler, "sampler"):
        raise ResumeError(
            f"the training loader has no sampler of indices ({type(batch_sampler).__name__}), so its order cannot be followed"
        )
    return batch_sampler


def capture(loader: Any) -> dict[str, Any]:
    """Return the generators from which the order of an epoch and the seeds of its workers are about to be drawn."""
    import torch

    generator = getattr(innermost_batch_sampler(loader.batch_sampler).sampler, "generator", None)
    return {
        "torch": trainer_state.pack(torch.get_rng_state()),
        "sampler": trainer_state.pack(generator.get_state()) if generator else None,
    }


def restore(loader: Any, captured: dict[str, Any]) -> None:
    """Restore what `capture` returned, so that the next iterator of `loader` has the same order."""
    import torch

    torch.set_rng_state(trainer_state.unpack(captured["torch"]))
    generator = getattr(innermost_batch_sampler(loader.batch_sampler).sampler, "generator", None)
    if generator is not None and captured["sampler"]:
        generator.set_state(trainer_state.unpack(captured["sampler"]))


def dataset_step(dataset: Any) -> int:
    """Return the step that a data set (or the first one of a group) was last set to; 0 for musubi-tuner's."""
    return getattr(getattr(dataset, "datasets", [dataset])[0], "current_step", 0)


def set_dataset_step(dataset: Any, step: int) -> None:
    """Set the step of a data set, on which token_warmup_step depends. musubi-tuner's have none."""
    if hasattr(dataset, "set_current_step"):
        dataset.set_current_step(step)
