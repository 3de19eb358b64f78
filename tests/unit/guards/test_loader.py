"""DataLoader settings that cannot hang: a pure table."""

import itertools

import pytest

from guards.loader import rules


def test_no_workers_drop_persistence_prefetch_and_timeout_together():
    made = rules(0, persistent_workers=True, prefetch_factor=4, timeout=60, platform="linux")
    off = {"persistent_workers": False, "prefetch_factor": None, "pin_memory": False}
    assert made == {"num_workers": 0, "timeout": 0.0, **off}


@pytest.mark.parametrize(("workers", "timeout", "named"), [(-1, 0, "num_workers=-1"), (1, -3, "timeout=-3")])
def test_negative_numbers_are_refused(workers, timeout, named):
    with pytest.raises(ValueError, match=named):
        rules(workers, timeout=timeout)


def test_torch_accepts_every_combination():
    torch = pytest.importorskip("torch")
    choices = itertools.product([0, 2], [False, True], [None, 3], [0, 7], ["linux", "win32", "darwin"])
    for workers, persistent, prefetch, timeout, platform in choices:
        made = rules(workers, persistent, prefetch, timeout, platform=platform)
        torch.utils.data.DataLoader([1, 2, 3], **made)  # raises ValueError for settings that contradict each other
