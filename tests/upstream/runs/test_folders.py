"""The number of steps that the page shows is the number that the trainer trains: counted by the trainers' own code."""

import itertools
import json
import random
import subprocess

import tiny_sd_scripts
import tomlkit
from draft_helpers import item
from PIL import Image
from trainer_helpers import flags
from upstream_code import musubi_buckets

import runs
from runs import command
from runs.paths import ROOT, datasets_dir
from trainer import data_order, dataset, validation
from trainer.arguments import parse
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
    path.write_text(tomlkit.dumps(command.dataset_tables(spec)), encoding="utf-8")
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


def test_the_built_in_trainer_trains_as_many_steps_as_the_page_shows(data):
    compared = 0
    for spec, folders in cases("diffusers", (0.0, 0.1, 0.25, 0.5)):
        images = dataset.read(written(spec, folders), parse(flags("m", "d", "o", train_batch_size=spec.batch_size)))
        if len(images) == 1 and spec.validation_split:
            continue  # the trainer refuses to hold out its only image, and so does the form
        kept, _ = validation.split(images, spec.validation_split, 7)
        batches = len(data_order.EpochSampler(kept, 7, 0, spec.gpus))
        assert shown(spec, folders) == spec.epochs * -(-batches // spec.gradient_accumulation), (spec, folders)
        compared += 1
    assert compared > 100


def test_sd_scripts_trains_as_many_steps_as_the_page_shows(data, tmp_path):
    tiny_sd_scripts.need()
    known = list(cases("sd-scripts", (0.0, 0.1, 0.25, 0.5)))[::3]
    asked = []
    for spec, folders in known:
        split = ["--validation_split", str(spec.validation_split), "--validation_seed", "7"]
        asked.append({"config": str(written(spec, folders)), "flags": split if spec.validation_split else []})
    tiny_sd_scripts.write_site(tmp_path)
    program = [str(tiny_sd_scripts.python()), str(ROOT / "tests/support/count_sd_scripts.py")]
    done = subprocess.run(
        [*program, str(tiny_sd_scripts.checkout())], input=json.dumps(asked), cwd=tiny_sd_scripts.checkout(),
        env=tiny_sd_scripts.environment(tmp_path), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for (spec, folders), (batches, held) in zip(known, json.loads(done.stdout.splitlines()[-1]), strict=True):
        # train_network.py: max_train_epochs × ceil(len(train_dataloader) / num_processes / gradient_accumulation_steps)
        steps = spec.epochs * -(-batches // (spec.gpus * spec.gradient_accumulation))
        assert shown(spec, folders) == steps, (spec, folders, held)


def test_musubi_tuner_trains_as_many_steps_as_the_page_shows(data):
    theirs = musubi_buckets("BucketBatchManager")
    selector = theirs["BucketSelector"]((128, 128), True, False, theirs["ARCHITECTURE_Z_IMAGE"])
    for spec, folders in cases("musubi", (0.0,)):
        batches = 0
        for name, sizes in folders.items():
            repeats = {"": spec.repeats, "3_dog": 3, "weight-2": 2 * spec.repeats}[name]
            buckets: dict = {}
            for size in sizes:
                buckets.setdefault(tuple(selector.get_bucket_resolution(size)), []).extend([None] * repeats)
            batches += len(theirs["BucketBatchManager"](buckets, spec.batch_size))
        steps = spec.epochs * -(-batches // (spec.gpus * spec.gradient_accumulation))
        assert shown(spec, folders) == steps, (spec, folders)
