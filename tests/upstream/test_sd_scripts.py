"""kohya's real FLUX trainer, tiny weights, CPU: what a run survives, and what ends it with a name."""

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
