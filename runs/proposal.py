"""Proposes repeats and epochs from the number of images, so that a run has about as many steps as its subject needs.

For a person that is 1,500 to 2,500 steps, a habit of LoRA trainers: FluxGym's defaults (10 repeats, 16 epochs) give
1,600 to 3,200 steps for the 10 to 20 images that its guide recommends, and kohya_ss users aim at about 100 steps for
each of 20 images. The same defaults give 48,000 steps for 300 images. Images in folders with repeats of their own
(kohya's `10_name`) keep them.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import presets

LEAST, TARGET, MOST = 1500, 2000, 2500
USUAL_EPOCHS = range(8, 21)  # enough saved LoRAs to choose from, and few enough for every one to differ
MAX_REPEATS = 100


@dataclass(frozen=True)
class Proposal:
    """Repeats, epochs and the optimizer steps that they give."""

    repeats: int
    epochs: int
    steps: int


def steps_per_epoch(images: int, repeats: int, fixed: int = 0, batch_size: int = 1, accumulation: int = 1) -> int:
    """Optimizer steps of one epoch on one GPU.

    Args:
        images: images that use `repeats`. fixed: images of folders with their own repeats, each counted that often.
    """
    return math.ceil(math.ceil((images * repeats + fixed) / batch_size) / accumulation)


def subjects() -> Sequence[dict[str, Any]]:
    """What a LoRA can be trained for: the rows of presets/templates.toml."""
    return presets.read_table("templates.toml")["subject"]


@functools.lru_cache(maxsize=64)
def propose(images: int, fixed: int = 0, batch_size: int = 1, accumulation: int = 1, target: int = TARGET) -> Proposal:
    """The proposal for these images; the defaults for none.

    The steps are between LEAST and MOST, which go with `target`, where any choice of repeats and epochs gives that
    many, else as near as possible. Of those, the usual number of epochs comes first, then about `target` steps, then
    repeats near FluxGym's 10.
    """
    least, most = LEAST * target // TARGET, MOST * target // TARGET
    if images + fixed <= 0:
        table = presets.defaults()["run"]
        return Proposal(table["repeats"], table["epochs"], 0)
    choices = []
    for repeats in range(1, MAX_REPEATS + 1 if images else 2):
        each = steps_per_epoch(images, repeats, fixed, batch_size, accumulation)
        near = {max(1, n // each + more) for n in (target, least, most) for more in (0, 1)}
        choices += [Proposal(repeats, epochs, epochs * each) for epochs in sorted(near)]
        if each > 2 * most:
            break

    def rank(one: Proposal) -> tuple[int, int, int, int, int]:
        outside = max(least - one.steps, one.steps - most, 0)
        unusual = max(USUAL_EPOCHS[0] - one.epochs, one.epochs - USUAL_EPOCHS[-1], 0)
        away = abs(one.steps - target)
        return outside, unusual, away // 100, abs(one.repeats - 10), away

    return min(choices, key=rank)
