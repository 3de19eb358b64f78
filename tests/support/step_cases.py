"""Runs with images of some sizes, and the steps that the page shows for them."""

import itertools
import random

from PIL import Image
from upstream_code import item

import runs
from runs import command
from runs.paths import datasets_dir
from ui.dataset import bucket_preview

SIZES = [(128, 128), (192, 128), (128, 192), (256, 128), (125, 125)]


FOLDERS = ["", "3_dog", "weight-2"]


def cases(backend, splits):
    """Specs with the images of their folders: name → sizes. Drawn by a fixed seed."""
    draw = random.Random(5)
    grid = itertools.product([1, 2, 5, 11], splits, [1, 3], [1, 2], [1, 2])
    for number, (images, split, batch, accumulation, gpus) in enumerate(grid):
        folders = {name: [draw.choice(SIZES) for _ in range(images + extra)] for extra, name in enumerate(FOLDERS)}
        folders = dict(list(folders.items())[: 1 + number % 3])
        if split and batch > 1:  # which images are held out is not known, so their buckets must not matter
            folders = {name: [SIZES[0]] * len(sizes) for name, sizes in folders.items()}
        fields = {"batch_size": batch, "gradient_accumulation": accumulation, "gpus": gpus, "epochs": 3, "repeats": 2}
        models = {"sd-scripts": "sdxl", "musubi": "z-image", "diffusers": "tiny-flux"}
        more = {"resolution": 128, "validation_split": split, "model": models[backend]}
        yield runs.make({"name": f"case {number}", "backend": backend, **fields, **more}), folders


def written(spec, folders):
    """The spec's dataset.toml, with its images on the disk."""
    root = datasets_dir() / spec.slug
    for name, sizes in folders.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number, size in enumerate(sizes):
            Image.new("RGB", size).save(root / name / f"{number}.png", compress_level=1)
            (root / name / f"{number}.txt").write_text("a thing\n", encoding="utf-8")
    path = root.with_suffix(".toml")
    path.write_text(command.dataset_toml(spec), encoding="utf-8")
    return path


def shown(spec, folders):
    """The steps that the page shows: the items of its draft, counted by bucket."""
    base = {"": ("", 1), "3_dog": ("3_dog", 1), "weight-2": ("", 2)}
    items = []
    for name, sizes in folders.items():
        folder, weight = base[name]
        items += [item(f"{name}{n}", *size, folder=folder, weight=weight) for n, size in enumerate(sizes)]
    found = bucket_preview.by_folder(spec, items)
    assert {name: len(buckets) for name, buckets in found.items()} == {n: len(s) for n, s in folders.items()}
    return runs.planned_steps(spec, found)
