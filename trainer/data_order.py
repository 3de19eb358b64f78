"""The order of the data and all random seeds as pure functions: batches of (seed, epoch), seeds of (seed, step, …).

So a resume restores only weights, optimizer and step, and the number of workers does not change the data. The alternative,
saving the states of random generators, breaks as soon as other code draws a number (as in resumes of sd-scripts).
"""

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator

from trainer.dataset import Image

Batch = tuple[int, ...]  # indices into the list of images


def seed_for(*parts: object) -> int:
    """A 63-bit seed that depends only on the text of `parts`."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def batches(images: list[Image], seed: int, epoch: int, world: int = 1) -> list[Batch]:
    """The batches of an epoch (0-based), in order; batch i is trained by rank i % world.

    Images of one batch have the same data set and bucket. Batches are repeated until every rank has the same number.
    """
    draw = random.Random(seed_for(seed, "order", epoch))
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


class EpochSampler:
    """A DataLoader sampler: the batches of one rank in one epoch, starting at a micro-batch."""

    def __init__(self, images: list[Image], seed: int, rank: int, world: int):
        self.images, self.seed, self.rank, self.world = images, seed, rank, world
        self.epoch, self.start = 0, 0

    def start_at(self, epoch: int, start: int) -> None:
        """Let the next iteration be epoch `epoch` (0-based), starting at micro-batch `start` of this rank."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return len(batches(self.images, self.seed, 0, self.world)) // self.world

    def __iter__(self) -> Iterator[Batch]:
        yield from batches(self.images, self.seed, self.epoch, self.world)[self.rank :: self.world][self.start :]
