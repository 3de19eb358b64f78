"""How a training is set up: the workers of its loader."""

from argparse import Namespace

from guards.loader import die_with_parent
from trainer import setup


def test_the_loaders_workers_do_not_outlive_the_trainer():
    """What that does to a worker: tests/process/guards/test_crash.py."""
    args = Namespace(max_data_loader_n_workers=1, persistent_data_loader_workers=False)
    loader = setup.make_loader(args, [((0, 0),), ((1, 0),)], Namespace(latents=[], texts=[]), Namespace(type="cpu"))
    assert loader.worker_init_fn is die_with_parent
