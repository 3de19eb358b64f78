"""kohya's real FLUX trainer, tiny weights, CPU: the same numbers with all patches, and runs that survive faults."""

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy
import patches_helpers
import pytest
import resume_helpers as helpers
import tiny_sd_scripts as tiny

from guards import heartbeat, startup

ON_DISK = ["--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk"]
EVERYTHING = [*ON_DISK, "--save_state", "--save_every_n_steps", "10", "--sample_every_n_steps", "10"]
EVERYTHING += ["--log_with", "tensorboard", "--validation_split", "0.1", "--persistent_data_loader_workers"]


@pytest.fixture(scope="module")
def runs(each_work, tmp_path_factory):
    """20 steps with all features that the patches change: without the patches, and with all of them."""

    def run(patched):
        out = tmp_path_factory.mktemp("patched" if patched else "plain")
        result = helpers.train(
            each_work, out, *EVERYTHING, patched=patched, env={"HANGPROOF_ATTEMPT": "2", **helpers.followed(out)},
            train_data_dir=str(tiny.copy_of(each_work, out)), max_train_steps="20", max_data_loader_n_workers="1",
            sample_prompts=str(each_work / "prompts.txt"), logging_dir=str(out / "logs"),
        )  # fmt: skip
        assert result.code == 0, result.log[-3000:]
        return out

    with ThreadPoolExecutor(2) as pool:
        return tuple(pool.map(run, (False, True)))


def test_twenty_steps_have_the_same_numbers_and_a_heartbeat_that_describes_them(runs):
    plain, guarded = runs
    phases = helpers.same_training(plain, guarded, 20, 2)
    firsts = ["import", "load", "cache_latents", "cache_text", "hash", "first_step", "step"]
    assert phases[:7] == firsts and sorted(phases[7:]) == ["end", "sample", "save", "validate"] and phases[-1] == "end"
    helpers.same_caches(plain, guarded)
    assert len(list(plain.rglob("*.npz"))) >= 18


def test_the_run_reaches_every_check_point_in_the_order_of_the_trainer(runs):
    assert (runs[1] / "phases.points").read_text().split() == [
        *("arguments", "folders", "tokenizer", "data", "accelerator", "model"),
        *("data", "network", "data", "network"),  # the captions of the training and of the validation set
        *("loader", "ready", "tracker", "ready", "first_step", "finished"),
    ]
    (beat,) = heartbeat.read_all(runs[1] / "hb")
    assert all(beat.reached) and beat.point == "finished"
    assert startup.read_about(beat.about)["device"] == "cpu"


def test_every_step_has_its_line_of_metrics(runs):
    found = [json.loads(line) for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
    recorded = [loss for epoch, _, loss in tiny.losses(runs[1] / "losses") if epoch >= 0]
    lines = [line for line in found if line["kind"] == "step"]
    others = [line for line in found if line not in lines]
    assert [(line["kind"], line["step"]) for line in others] == [("validation", n) for n in (9, 18, 20)]
    assert len({line["val_loss"] for line in others}) == 3 and {line["attempt"] for line in found} == {2}
    assert all(any(abs(line["loss"] - loss) < 1e-9 for loss in recorded) for line in lines)
    assert lines[0]["lr"] == 1e-3 and lines[-1]["lr"] < 1e-4  # a cosine
    assert [line["epoch"] for line in lines] == sorted(line["epoch"] for line in lines)
    assert all(0 < line["step_s"] < 30 for line in lines)


# Complete runs with injected faults.


@pytest.mark.skipif(sys.platform == "win32", reason="no FIFOs on this platform")
def test_a_cache_that_blocks_in_a_loader_worker(each_work, runs, tmp_path):
    images = tiny.copy_of(runs[0], tmp_path)
    stuck = images / "1_thing" / "004_flux_te.npz"
    stuck.unlink()
    os.mkfifo(stuck)
    result = helpers.train(
        each_work, tmp_path, *ON_DISK, "--skip_cache_check", train_data_dir=str(images), max_train_epochs="1",
        env={"HANGPROOF_NPZ_TIMEOUT_S": "2", "HANGPROOF_EXIT_GRACE_S": "8"}, max_data_loader_n_workers="1",
    )  # fmt: skip
    assert result.code == 1, result.log[-2000:]
    assert f"TimeoutError: waited 2 s for the directory of {stuck}" in result.log
    assert re.search(r"batch \d+ of the data loader from worker 0 \(pid \d+\) failed: TimeoutError", result.log)


def test_damaged_caches_are_set_aside_and_encoded_again_on_the_restart(each_work, runs, tmp_path):
    """The first run reads a damaged cache in the middle of training; two more are damaged before the second."""
    images = tiny.copy_of(runs[0], tmp_path) / "1_thing"
    names = ("002_0064x0064_flux.npz", "004_flux_te.npz", "006_flux_te.npz")
    truncated, flipped, another = (images / name for name in names)

    def train():
        changed = {"train_data_dir": str(images.parent), "max_train_epochs": "1", "max_data_loader_n_workers": "1"}
        return helpers.train(each_work, tmp_path, *ON_DISK, **changed)

    flip(flipped)  # sd-scripts looks up one small member only, so the damage is found in the middle of training
    first = train()
    assert first.code == 1 and f"ValueError: {flipped} is damaged" in first.log.replace("\n", " "), first.log[-2000:]
    assert flipped.with_name(f"{flipped.name}.corrupt").exists() and not flipped.exists()
    # The folder has held a damaged cache, so the restart verifies all its caches before training starts.
    flip(another)
    truncated.write_bytes(truncated.read_bytes()[:500])
    second = train()
    assert second.code == 0, second.log[-2000:]
    assert f"{another} is damaged" in second.log and f"{truncated} is damaged" in second.log
    for path in (truncated, flipped, another):
        before, encoded = numpy.load(runs[0] / "images/1_thing" / path.name), numpy.load(path)
        assert path.with_name(path.name + ".corrupt").exists()
        assert encoded.files == before.files and all(encoded[k].shape == before[k].shape for k in before.files)
    assert not list(images.glob(".*.tmp"))


def flip(path):
    """Change one byte in the middle of the largest member; the zip directory stays intact."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("cached", [False, True])
def test_an_unreadable_image_is_replaced_named_and_counted_or_ends_the_run_while_images_are_cached(
    each_work, tmp_path, cached
):
    """Its second half is missing: the header is intact, so it is in the data set. Steps and epochs keep their number."""
    bad = tiny.copy_of(each_work, tmp_path) / "1_thing" / "004.png"
    bad.write_bytes(bad.read_bytes()[:6000])
    args = tiny.arguments(
        each_work, tmp_path, train_data_dir=str(bad.parents[1]), max_train_epochs="2", max_data_loader_n_workers="1"
    )
    args = [argument for argument in args if argument != "--cache_latents"] + ["--cache_latents"] * cached
    result = patches_helpers.train(each_work, args, TINY_LOSSES=str(tmp_path / "losses"))
    assert result.code == cached, result.log[-2000:]
    named = f"image {bad} cannot be read (OSError: image file is truncated"
    assert named in result.log
    if not cached:
        places = [(epoch, step) for epoch, step, _ in tiny.losses(tmp_path / "losses")]
        assert places == [(epoch, step) for epoch in range(2) for step in range(10)]
        lines = re.findall(r"hangproof: batch \d+ is replaced by the next one: (.*)", result.log)
        assert len(lines) == 2 and all(line.startswith(named) for line in lines), result.log[-2000:]  # in each epoch
        assert all(line.endswith("(1 of at most 10 unreadable images)") for line in lines)


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
    # an upload of a tracker outside `finish`, such as a library's own thread
    "accelerate.accelerator": "import time\nmodule.Accelerator.end_training = lambda self: time.sleep(3600)\n",
    "library.huggingface_util": "import time\nmodule.HfApi.upload_file = lambda *a, **k: time.sleep(3600)\n"
    "module.HfApi.create_repo = module.HfApi.repo_info = lambda *a, **k: None\n",
    "networks.lora_flux": (
        "import time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "ThreadPoolExecutor(1, thread_name_prefix='stuck-pool').submit(time.sleep, 3600)\n"
    ),
}


def test_a_run_survives_failures_of_what_it_does_not_need(each_work, tmp_path):
    """A tracker that never starts, a sample too slow, one that fails, an upload and an end of the trackers that never
    return, a stuck pool thread. Nothing of the run is missing, and the outcome says what is."""
    for name, text in SURVIVES.items():
        (tmp_path / f"{name}.py").write_text(text)
    limits = {"TRACKER_TIMEOUT": "1", "SAMPLE_BUDGET": "1.5", "EXIT_GRACE": "2"}
    limits |= {"UPLOAD_TIMEOUT": "1", "UPLOAD_EXIT": "1", "TRACKERS_END": "1"}
    result = helpers.train(
        each_work, tmp_path, "--log_with", "tensorboard", "--async_upload", "--sample_every_n_steps", "3",
        "--persistent_data_loader_workers",  # with no workers: torch refuses that without us
        faults=";".join(f"{name}={tmp_path / name}.py" for name in SURVIVES),
        env={f"HANGPROOF_{name}_S": v for name, v in limits.items()} | {"HANGPROOF_HEARTBEAT": str(tmp_path / "hb")},
        max_train_steps="10", sample_prompts=str(each_work / "prompts.txt"), logging_dir=str(tmp_path / "logs"),
        save_every_n_steps="5", huggingface_repo_id="somebody/something",
    )  # fmt: skip
    assert result.code == 0, result.log[-3000:]
    for message in (
        "TimeoutError: waited 1 s for trackers to start (tensorboard); the run continues offline",
        "sample image 1 skipped: BudgetExceeded: the budget of 1.5 s was exceeded after 1 denoising steps",
        "sample image 1 skipped: MemoryError: no memory for a picture",
        "waiting for 2 uploads to the hub",
        "waited 1 s for 2 uploads to the hub; exiting without them",
        "waited 2 s at exit for stuck-pool_0; exiting with code 0",
        f"waited 1 s for the upload of {tmp_path}/made/tiny.safetensors; the run continues",
    ):
        assert f"hangproof: {message}" in result.log, (message, result.log[-3000:])
    assert [len(one) for one in helpers.samples(tmp_path).values()] == [1]  # of the third occasion
    assert "tiny.safetensors" in helpers.names(tmp_path) and len(tiny.losses(tmp_path / "losses")) == 10
    (beat,) = heartbeat.read_all(tmp_path / "hb")
    assert beat.outcome == "done" and beat.note.startswith("the tracker did not finish: waited 1 s for ")
