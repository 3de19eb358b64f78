"""The order of the data and all random seeds as pure functions: batches of (seed, epoch), seeds of (seed, step, …).

So a resume restores only weights, optimizer and step, and the number of workers does not change the data. Saved states
of random generators, the alternative, break as soon as other code draws a number (as in resumes of sd-scripts).
"""

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator

from trainer.dataset import Image

Batch = tuple[tuple[int, int], ...]  # of each image: its index in the list of images, and that of one of its texts


def seed_for(*parts: object) -> int:
    """A 63-bit seed that depends only on the text of `parts`, which may be the name of a file that is not UTF-8."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def text_of(image: Image, *use: object) -> int:
    """Which of its texts an image has in a use, that `use` names."""
    draw = random.Random(seed_for("text", *use))
    if draw.random() < image.dropout:
        return len(image.texts) - 1
    return 1 + draw.randrange(len(image.orders)) if image.orders else 0


def batches(images: list[Image], seed: int, epoch: int) -> list[Batch]:
    """The batches of an epoch (0-based), in order. Images of one batch have the same data set and bucket."""
    draw = random.Random(seed_for(seed, "order", epoch))
    groups: dict[tuple, list[int]] = defaultdict(list)
    for index, image in enumerate(images):
        groups[image.dataset, image.bucket, image.batch_size] += [index] * image.repeats
    out: list[list[int]] = []
    for key in sorted(groups):
        members = groups[key]
        draw.shuffle(members)
        out += [members[i : i + key[2]] for i in range(0, len(members), key[2])]
    draw.shuffle(out)
    return [
        tuple((one, text_of(images[one], seed, epoch, place, at)) for at, one in enumerate(batch))
        for place, batch in enumerate(out)
    ]


class EpochSampler:
    """A DataLoader sampler: the batches of one rank in one epoch, starting at a micro-batch.

    Batch i of an epoch is trained by rank i % world, so a step has the same batches as one process that accumulates the
    gradients of `world` times as many. Where an epoch does not divide, the last ranks have one batch less in its last
    step and none is repeated. total: the batches of all ranks. epoch, start: of the next iteration, both 0-based.
    """

    def __init__(self, images: list[Image], seed: int, rank: int, world: int):
        self.images, self.seed, self.rank, self.world = images, seed, rank, world
        self.epoch, self.start = 0, 0
        self.total = len(batches(images, seed, 0))

    def __len__(self) -> int:
        return -(-self.total // self.world)

    def __iter__(self) -> Iterator[Batch]:
        yield from batches(self.images, self.seed, self.epoch)[self.rank :: self.world][self.start :]
