"""What comes when, as pure functions: the batches of an epoch of (seed, epoch), a random number of (seed, step, …).

A resume then restores nothing but weights, optimizer and step: no generator state is saved, skipped or replayed, and a
run with other worker counts sees the same data. Saving generator states was the alternative; it breaks as soon as
anything else draws a number (facts: sd-scripts' resumes).
"""

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator

from trainer.dataset import Image

Batch = tuple[int, ...]  # indices into the list of images


def seed_of(*parts: object) -> int:
    """A 63-bit seed that depends on nothing but `parts` (their text)."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def batches(images: list[Image], seed: int, epoch: int, world: int = 1) -> list[Batch]:
    """The batches of an epoch (0-based), in order; batch i is trained by rank i % world.

    Images of one batch share their data set and bucket. The last ones are repeated until every rank has as many.
    """
    draw = random.Random(seed_of(seed, "order", epoch))
    groups: dict[tuple, list[int]] = defaultdict(list)
    for index, image in enumerate(images):
        groups[image.dataset, image.bucket, image.batch_size] += [index] * image.repeats
    out: list[Batch] = []
    for key in sorted(groups):
        members = groups[key]
        draw.shuffle(members)
        out += [tuple(members[i : i + key[2]]) for i in range(0, len(members), key[2])]
    draw.shuffle(out)
    while len(out) % world:
        out.append(out[len(out) % world])
    return out


class Order:
    """A DataLoader sampler: this rank's batches of one epoch, from a given micro-batch on."""

    def __init__(self, images: list[Image], seed: int, rank: int, world: int):
        self.images, self.seed, self.rank, self.world = images, seed, rank, world
        self.epoch, self.start = 0, 0

    def at(self, epoch: int, start: int) -> None:
        """The next iteration is epoch `epoch` (0-based) from this rank's micro-batch `start` on."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return len(batches(self.images, self.seed, 0, self.world)) // self.world

    def __iter__(self) -> Iterator[Batch]:
        yield from batches(self.images, self.seed, self.epoch, self.world)[self.rank :: self.world][self.start :]
