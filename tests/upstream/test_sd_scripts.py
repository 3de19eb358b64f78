"""kohya's real FLUX trainer, tiny weights, CPU: what a run survives, and what ends it with a name."""

import re

import patches_helpers
import pytest
import resume_helpers as helpers
import tiny_sd_scripts as tiny

from guards import heartbeat

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
}


def test_a_run_survives_failures_of_what_it_does_not_need(each_work, tmp_path):
    """A tracker that never starts, a sample too slow, one that fails, an upload and an end of the trackers that never
    return. Nothing of the run is missing, and the outcome says what is."""
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
    for message in (
        "TimeoutError: waited 1 s for trackers to start (tensorboard); the run continues offline",
        "sample image 1 skipped: BudgetExceeded: the budget of 1.5 s was exceeded after 1 denoising steps",
        "sample image 1 skipped: MemoryError: no memory for a picture",
        "waiting for 2 uploads to the hub",
        "waited 1 s for 2 uploads to the hub; exiting without them",
        f"waited 1 s for the upload of {tmp_path}/made/tiny.safetensors; the run continues",
    ):
        assert f"hangproof: {message}" in result.log, (message, result.log[-3000:])
    assert [len(one) for one in helpers.samples(tmp_path).values()] == [1]  # of the third occasion
    assert "tiny.safetensors" in helpers.names(tmp_path) and len(tiny.losses(tmp_path / "losses")) == 10
    (beat,) = heartbeat.read_all(tmp_path / "hb")
    assert beat.outcome == "done" and beat.note.startswith("the tracker did not finish: waited 1 s for ")


@pytest.mark.parametrize("cached", [False, True])
def test_an_unreadable_image_is_replaced_and_named_or_ends_the_run_while_images_are_cached(each_work, tmp_path, cached):
    """Its second half is missing; by its header it is in the data set. Steps and epochs keep their number."""
    bad = tiny.copy_of(each_work, tmp_path) / "1_thing" / "004.png"
    bad.write_bytes(bad.read_bytes()[:6000])
    short = {"max_train_epochs": "2", "max_data_loader_n_workers": "1"}
    args = tiny.arguments(each_work, tmp_path, train_data_dir=str(bad.parents[1]), **short)
    args = [argument for argument in args if argument != "--cache_latents"] + ["--cache_latents"] * cached
    env = tiny.environment(each_work, TINY_LOSSES=str(tmp_path / "losses"))
    result = patches_helpers.watch(tiny.command(*args), env, tiny.checkout(), 300, int(cached))
    named = f"image {bad} cannot be read (OSError: image file is truncated"
    assert named in result.log
    if not cached:
        places = [(epoch, step) for epoch, step, _ in tiny.losses(tmp_path / "losses")]
        assert places == [(epoch, step) for epoch in range(2) for step in range(10)]
        lines = re.findall(r"hangproof: batch \d+ is replaced by the next one: (.*)", result.log)
        assert len(lines) == 2 and all(line.startswith(named) for line in lines), result.log[-2000:]  # in each epoch
        assert all(line.endswith("(1 of at most 10 unreadable images)") for line in lines)


SLEEPS = """
import os, time
original, read = module.BaseDataset.__getitem__, [0]
def __getitem__(self, index):
    read[0] += 1
    if read[0] == 4:
        os.write(1, f"HANG pid {os.getpid()}\\n".encode())
        time.sleep(3600)
    return original(self, index)
module.BaseDataset.__getitem__ = __getitem__
"""


@pytest.mark.journey
def test_a_worker_that_sleeps_over_its_fourth_batch_is_named(work, tmp_path):
    (tmp_path / "fault.py").write_text(SLEEPS)
    env = {"HANGPROOF_DATALOADER_TIMEOUT_S": "4", "HANGPROOF_DATALOADER_FIRST_BATCH_S": "60"}
    env["HANGPROOF_HEARTBEAT"] = str(tmp_path / "hb")
    faults = f"{tiny.home('BaseDataset')}={tmp_path / 'fault.py'}"
    changed = {"max_train_epochs": "1", "max_data_loader_n_workers": "1"}
    result = helpers.train(work, tmp_path, faults=faults, env=env, code=75, **changed)
    waited = r"hangproof: (waited 4 s for batch \d+ of the data loader from worker \d \(pid (\d+)\))"
    found = re.search(waited, result.log)
    assert found and f"HANG pid {found[2]}\n" in result.log, result.log[-3000:]
    (beat,) = heartbeat.read_all(tmp_path / "hb")
    assert beat.outcome == "deadline" and beat.note == found[1] and beat.phase in ("first_step", "step")
