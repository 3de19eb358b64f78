"""kohya's real FLUX trainer, tiny weights, CPU: the same numbers with all patches, and runs that survive faults."""

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy
import patches_helpers as helpers
import pytest
import tiny_sd_scripts as tiny

from guards import heartbeat, startup

EVERYTHING = [
    "--cache_latents_to_disk",
    "--cache_text_encoder_outputs_to_disk",
    "--save_state",
    "--save_every_n_steps",
    "10",
    "--sample_every_n_steps",
    "15",
    "--log_with",
    "tensorboard",
    "--validation_split",
    "0.1",
    "--persistent_data_loader_workers",
]


@pytest.fixture(scope="module")
def runs(work, tmp_path_factory):
    """30 steps with all features that the patches change: without the patches, and with all of them."""

    def run(patched):
        out = tmp_path_factory.mktemp("patched" if patched else "plain")
        images = tiny.copy_of(work, out)
        (out / "run").mkdir()
        args = tiny.arguments(
            work, out, *EVERYTHING, train_data_dir=str(images), max_train_steps="30", max_data_loader_n_workers="1",
            sample_prompts=str(work / "prompts.txt"), logging_dir=str(out / "logs"),
        )  # fmt: skip
        env = {
            "TINY_LOSSES": str(out / "losses"),
            "HANGPROOF_HEARTBEAT": str(out / "hb"),
            "HANGPROOF_RUN": str(out / "run"),
            "HANGPROOF_ATTEMPT": "2",
            "HANGPROOF_INJECT": "patches_injectors:phases",
            "PHASES_FILE": str(out / "phases"),
        }
        result = helpers.train(work, args, patched=patched, **env)
        assert result.code == 0, result.log[-3000:]
        return out, result

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((False, True), pool.map(run, (False, True)), strict=True))


def test_thirty_steps_have_identical_losses(runs):
    plain, patched = (tiny.losses(runs[p][0] / "losses") for p in (False, True))
    assert len(plain) >= 30
    assert plain == patched


def test_the_weights_are_identical(runs):
    def tensors(out):
        data = (out / "tiny.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        return {k: (v, data[8 + length :][slice(*v["data_offsets"])]) for k, v in header.items() if k != "__metadata__"}

    plain, patched = tensors(runs[False][0]), tensors(runs[True][0])
    assert len(plain) > 10 and plain == patched


def test_caches_and_samples_are_identical(runs):
    plain, patched = (runs[p][0] for p in (False, True))
    caches = sorted(p.relative_to(plain) for p in plain.rglob("*.npz"))
    assert len(caches) >= 18
    for name in caches:
        one, other = numpy.load(plain / name), numpy.load(patched / name)
        assert one.files == other.files
        assert all(numpy.array_equal(one[k], other[k]) for k in one.files)
    pictures = [sorted(p.read_bytes() for p in (out / "sample").glob("*.png")) for out in (plain, patched)]
    assert len(pictures[0]) == 2 and pictures[0] == pictures[1]


def test_the_heartbeat_describes_the_run(runs):
    out, _ = runs[True]
    (beat,) = heartbeat.read_all(out / "hb")
    assert (beat.outcome, beat.step, beat.planned, beat.count) == ("done", 30, 30, 30)
    seen = (out / "phases").read_text().split()
    order = [
        "import",
        "load",
        "cache_latents",
        "cache_text",
        "hash",
        "first_step",
        "step",
        "sample",
        "save",
        "validate",
        "end",
    ]
    firsts = list(dict.fromkeys(seen))
    assert sorted(firsts) == sorted(order)
    assert firsts[:7] == order[:7] and firsts[-1] == "end"
    assert not (runs[False][0] / "hb").exists()


def test_the_run_reaches_every_check_point_in_the_order_of_the_trainer(runs):
    out, _ = runs[True]
    assert (out / "phases.points").read_text().split() == [
        *("arguments", "folders", "tokenizer", "data", "accelerator", "model"),
        *("data", "network", "data", "network"),  # the captions of the training and of the validation set
        *("loader", "ready", "tracker", "ready", "first_step", "finished"),
    ]
    (beat,) = heartbeat.read_all(out / "hb")
    assert all(beat.reached) and beat.point == "finished"
    assert startup.read_about(beat.about)["device"] == "cpu"


def test_every_step_has_its_line_of_metrics(runs):
    out, _ = runs[True]
    found = [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]
    recorded = [loss for epoch, _, loss in tiny.losses(out / "losses") if epoch >= 0]
    lines = [line for line in found if line["kind"] == "step"]
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert [(line["kind"], line["step"]) for line in found if line not in lines] == [
        ("validation", n) for n in (9, 18, 27, 30)
    ]
    assert {line["attempt"] for line in found} == {2}
    assert all(any(abs(line["loss"] - loss) < 1e-9 for loss in recorded) for line in lines)
    assert lines[0]["lr"] == 1e-3 and lines[-1]["lr"] < 1e-4  # a cosine
    assert [line["epoch"] for line in lines] == sorted(line["epoch"] for line in lines)
    assert all(0 < line["step_s"] < 30 for line in lines)


# Complete runs with injected faults. The runs are functions, started together; each test checks the result of one.


def disk_args(work, out, images, *more, **changed):
    on_disk = ("--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk")
    return tiny.arguments(work, out, *on_disk, *more, train_data_dir=str(images), max_train_epochs="1", **changed)


def blocked_cache(work, out, cached):
    """A FIFO in place of a cache, and spawned loader workers."""
    images = tiny.copy_of(cached, out)
    stuck = images / "1_thing" / "004_flux_te.npz"
    stuck.unlink()
    os.mkfifo(stuck)
    (out / "spawn.py").write_text("import multiprocessing\nmultiprocessing.set_start_method('spawn', force=True)\n")
    args = disk_args(work, out, images, "--skip_cache_check", max_data_loader_n_workers="1")
    env = {"HANGPROOF_NPZ_TIMEOUT_S": "2", "TINY_FAULTS": f"torch.utils.data.dataloader={out / 'spawn.py'}"}
    return helpers.train(work, args, HANGPROOF_EXIT_GRACE_S="8", **env)


DAMAGED = ("002_0064x0064_flux.npz", "004_flux_te.npz", "006_flux_te.npz")


def damaged_caches(work, out, cached):
    """Two runs: the first reads a damaged cache in the middle of training; two more are damaged before the second."""
    images = tiny.copy_of(cached, out) / "1_thing"
    truncated, flipped, another = (images / name for name in DAMAGED)
    args = disk_args(work, out, images.parent, max_data_loader_n_workers="1")
    flip(flipped)  # sd-scripts looks up one small member only, so the damage is found in the middle of training
    first = helpers.train(work, args)
    first_left = sorted(path.name for path in images.iterdir())
    # The folder has held a damaged cache, so the restart verifies all its caches before training starts.
    flip(another)
    truncated.write_bytes(truncated.read_bytes()[:500])
    return first, first_left, helpers.train(work, args)


def flip(path):
    """Change one byte in the middle of the largest member; the zip directory stays intact."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


def cut_images(work, out, cached, *switches):
    """An image whose second half is missing: its header is intact, so it is in the data set."""
    images = tiny.copy_of(work, out)
    bad = images / "1_thing" / "004.png"
    bad.write_bytes(bad.read_bytes()[:6000])
    args = tiny.arguments(work, out, train_data_dir=str(images), max_train_epochs="2", max_data_loader_n_workers="1")
    args = [argument for argument in args if argument != "--cache_latents"]
    return helpers.train(work, [*args, *switches], TINY_LOSSES=str(out / "losses"))


def cut_image_cached(work, out, cached):
    return cut_images(work, out, cached, "--cache_latents")


SURVIVES = {
    "accelerate.tracking": "import time\nmodule.TensorBoardTracker.__init__ = lambda self, *a, **k: time.sleep(3600)\n",
    "library.flux_train_utils": (
        "import time\nreal, calls = module.denoise, []\n"
        "def denoise(model, *args, **kwargs):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 2:\n        raise MemoryError('no memory for a picture')\n"
        "    if len(calls) == 1:\n"
        "        step = model.forward\n"
        "        def slow(*a, **k):\n            time.sleep(1.6)\n            return step(*a, **k)\n"
        "        model.forward = slow\n"
        "        try:\n            return real(model, *args, **kwargs)\n"
        "        finally:\n            del model.forward\n"
        "    return real(model, *args, **kwargs)\n"
        "module.denoise = denoise\n"
    ),
    "library.huggingface_util": "import time\nmodule.HfApi.upload_file = lambda *a, **k: time.sleep(3600)\n"
    "module.HfApi.create_repo = module.HfApi.repo_info = lambda *a, **k: None\n",
    "networks.lora_flux": (
        "import time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "ThreadPoolExecutor(1, thread_name_prefix='stuck-pool').submit(time.sleep, 3600)\n"
    ),
}


def everything_at_once(work, out, cached):
    """A tracker that never starts, a sample too slow, one that fails, an upload that never ends, a stuck pool thread."""
    faults = []
    for name, text in SURVIVES.items():
        (out / f"{name}.py").write_text(text)
        faults.append(f"{name}={out / name}.py")
    args = tiny.arguments(
        work, out, "--log_with", "tensorboard", "--async_upload", "--sample_every_n_steps", "3",
        "--persistent_data_loader_workers",  # with no workers: torch refuses that without us
        max_train_steps="10", sample_prompts=str(work / "prompts.txt"), logging_dir=str(out / "logs"),
        save_every_n_steps="5", huggingface_repo_id="somebody/something",
    )  # fmt: skip
    limits = {
        "HANGPROOF_TRACKER_TIMEOUT_S": "1",
        "HANGPROOF_SAMPLE_BUDGET_S": "1.5",
        "HANGPROOF_UPLOAD_TIMEOUT_S": "1",
        "HANGPROOF_UPLOAD_EXIT_S": "1",
        "HANGPROOF_EXIT_GRACE_S": "2",
        "TINY_LOSSES": str(out / "losses"),
    }
    return helpers.train(work, args, TINY_FAULTS=";".join(faults), **limits)


SCENARIOS = (blocked_cache, damaged_caches, cut_images, cut_image_cached, everything_at_once)


@pytest.fixture(scope="module")
def scenarios(request, work, runs, tmp_path_factory):
    folders = {scenario.__name__: tmp_path_factory.mktemp(scenario.__name__) for scenario in SCENARIOS}
    cached = runs[False][0]  # its images have the plain run's caches beside them
    jobs = {scenario.__name__: partial(scenario, work, folders[scenario.__name__], cached) for scenario in SCENARIOS}
    with helpers.ahead(request, "scenario", jobs) as futures:
        yield folders, futures


@pytest.fixture
def scenario(request, scenarios):
    """(its folder, the result of its function)"""
    folders, futures = scenarios
    return folders[request.param], futures[request.param].result()


def runs_scenario(scenario):
    return helpers.asks("scenario", scenario.__name__)


@pytest.mark.skipif(sys.platform == "win32", reason="no FIFOs on this platform")
@runs_scenario(blocked_cache)
def test_a_cache_that_blocks_in_a_spawned_loader_worker(scenario):
    """The worker is a new interpreter. Its error, which reaches the parent, shows that it has the patches."""
    out, result = scenario
    assert result.code == 1, result.log[-2000:]
    assert f"TimeoutError: waited 2 s for the directory of {out}/images/1_thing/004_flux_te.npz" in result.log
    assert re.search(r"batch \d+ of the data loader from worker 0 \(pid \d+\) failed: TimeoutError", result.log)


@runs_scenario(damaged_caches)
def test_damaged_caches_are_set_aside_and_encoded_again_on_the_restart(scenario, runs):
    out, (first, first_left, second) = scenario
    images = out / "images/1_thing"
    truncated, flipped, another = (images / name for name in DAMAGED)
    assert first.code == 1, first.log[-2000:]
    assert f"ValueError: {flipped} is damaged" in first.log.replace("\n", " ")
    assert f"{flipped.name}.corrupt" in first_left and flipped.name not in first_left
    assert second.code == 0, second.log[-2000:]
    assert f"{another} is damaged" in second.log and f"{truncated} is damaged" in second.log
    for path in (truncated, flipped, another):
        before = numpy.load(runs[False][0] / "images/1_thing" / path.name)
        encoded = numpy.load(path)
        assert path.with_name(path.name + ".corrupt").exists()
        assert encoded.files == before.files and all(encoded[k].shape == before[k].shape for k in before.files)
    assert not list(images.glob(".*.tmp"))


@runs_scenario(cut_images)
def test_an_unreadable_image_is_replaced_named_and_counted(scenario):
    """Steps and epochs keep their number: another batch replaces the one with the image."""
    out, result = scenario
    assert result.code == 0, result.log[-2000:]
    places = [(epoch, step) for epoch, step, _ in tiny.losses(out / "losses")]
    assert places == [(epoch, step) for epoch in range(2) for step in range(10)]
    lines = re.findall(r"hangproof: batch \d+ is replaced by the next one: (.*)", result.log)
    assert len(lines) == 2, result.log[-2000:]  # once in each epoch
    for line in lines:
        assert line.startswith(f"image {out}/images/1_thing/004.png cannot be read (OSError: image file is truncated")
        assert line.endswith("(1 of at most 10 unreadable images)")


@runs_scenario(cut_image_cached)
def test_an_unreadable_image_ends_the_run_while_images_are_cached(scenario):
    out, result = scenario
    assert result.code == 1
    assert f"image {out}/images/1_thing/004.png cannot be read (OSError: image file is truncated" in result.log


@runs_scenario(everything_at_once)
def test_a_run_survives_failures_of_what_it_does_not_need(scenario):
    out, result = scenario
    assert result.code == 0, result.log[-3000:]
    for message in (
        "TimeoutError: waited 1 s for trackers to start (tensorboard); the run continues offline",
        "sample image 1 skipped: BudgetExceeded: the budget of 1.5 s was exceeded after 1 denoising steps",
        "sample image 1 skipped: MemoryError: no memory for a picture",
        "waiting for 2 uploads to the hub",
        "waited 1 s for 2 uploads to the hub; exiting without them",
        "waited 2 s at exit for stuck-pool_0; exiting with code 0",
    ):
        assert f"hangproof: {message}" in result.log, (message, result.log[-3000:])
    assert f"waited 1 s for the upload of {out}/tiny.safetensors; the run continues" in result.log
    assert len(list((out / "sample").glob("*.png"))) == 1  # of the third occasion
    assert (out / "tiny.safetensors").exists() and len(tiny.losses(out / "losses")) == 10
