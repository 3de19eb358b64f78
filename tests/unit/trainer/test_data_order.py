"""The order of images, and seeds: functions of their arguments alone."""

from collections import Counter
from pathlib import Path

from trainer.data_order import EpochSampler, batches, seed_for
from trainer.dataset import Image


def images(count=7, batch_size=2):
    size = [(64, 64), (80, 48)]
    return [Image(Path(f"{i}.png"), "", 3, size[i % 2], size[i % 2], 0, batch_size) for i in range(count)]


def test_the_order_is_a_function_of_seed_and_epoch_and_shows_each_image_as_often_as_asked():
    data = images()
    one = batches(data, 1, 0)
    assert one == batches(data, 1, 0)
    assert one != batches(data, 1, 1) and one != batches(data, 2, 0)
    assert Counter(i for batch in one for i, _ in batch) == dict.fromkeys(range(7), 3)
    assert all(len({data[i].bucket for i, _ in batch}) == 1 for batch in one)


def test_ranks_share_the_batches_of_an_epoch_evenly():
    data = images(5, batch_size=1)  # 15 batches for 2 ranks: none is seen twice
    shares = [list(EpochSampler(data, 1, rank, 2)) for rank in range(2)]
    assert [len(share) for share in shares] == [8, 7] and len(EpochSampler(data, 1, 1, 2)) == 8
    assert [shares[i % 2][i // 2] for i in range(15)] == batches(data, 1, 0)


def test_seeds_depend_on_their_parts_alone():
    assert seed_for(42, "noise", 7, 0, 0) == 2413588734058466749  # older states continue with the same numbers
    assert len({seed_for(1, "noise", step, micro) for step in range(100) for micro in range(4)}) == 400
    assert seed_for(1, 12) != seed_for(11, 2)
