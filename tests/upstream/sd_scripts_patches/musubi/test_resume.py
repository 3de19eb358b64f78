"""A stopped, killed and resumed run of musubi-tuner equals the uninterrupted one: steps, losses, LR, names, weights.

With gradient accumulation, workers that stay and a schedule-free optimizer, whose weights are converted for each sample and
save; tests/campaigns/test_epoch_ends.py has all combinations.
"""

import json

import musubi_helpers
import pytest
import resume_helpers as helpers
import tiny_musubi as tiny

from guards import heartbeat

ACCUMULATION, EPOCHS, STEPS = 2, 3, 12
FLAGS = ["--save_state", "--save_every_n_steps", str(helpers.INTERVAL), "--save_every_n_epochs", "1"]
FLAGS += ["--max_train_epochs", str(EPOCHS), "--gradient_accumulation_steps", str(ACCUMULATION)]
FLAGS += ["--max_data_loader_n_workers", "2", "--persistent_data_loader_workers", "--sample_every_n_epochs", "1"]
FLAGS += ["--timestep_sampling", "uniform", "--num_timestep_buckets", "4"]
FLAGS += ["--optimizer_type", "schedulefree.AdamWScheduleFree", "--log_with", "tensorboard"]
POINTS = "arguments folders data accelerator tokenizer model network loader ready tracker ready first_step finished"


def train(folder, *more, **given):
    """One process in `folder`, which gets caches and a data set first."""
    if not (folder / "dataset.toml").exists():
        tiny.cached(tiny.workdir(), folder)
    paths = ["--sample_prompts", str(tiny.workdir() / "prompts.txt"), "--logging_dir", str(folder / "logs")]
    env = helpers.followed(folder) | given.pop("env", {})
    return musubi_helpers.train(folder, *FLAGS, *paths, *more, env=env, **given)


@pytest.fixture(scope="module")
def runs(musubi, tmp_path_factory):
    return helpers.disturbed(train, tmp_path_factory.mktemp("musubi"))


def test_a_disturbed_run_has_every_loss_rate_lora_state_and_sample_of_the_uninterrupted_one(runs):
    """musubi-tuner alone trains all steps once more."""
    helpers.same_run(*runs, ACCUMULATION, 7, EPOCHS)


def test_the_heartbeat_and_the_metrics_describe_the_run(runs):
    """That guarded training has the same numbers: tests/campaigns/test_runs_families.py."""
    folder, phases = runs[0], helpers.phases(runs[0])
    assert phases[:3] == ["import", "load", "first_step"] and phases[-1] == "end"
    assert sorted(phases[3:-1]) == ["sample", "save", "step"]
    assert (folder / "phases.points").read_text().split() == POINTS.split()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["lr"]) for line in lines] == [(step, 1e-3) for step in range(1, STEPS + 1)]
    (beat,) = heartbeat.read_all(folder / "hb")
    assert all(beat.reached) and (beat.point, beat.epoch, beat.about["device"]) == ("finished", EPOCHS, "cpu")


@pytest.mark.parametrize(("state", "samples"), [("tiny-000002-state", 2), ("tiny-state", 1)])
def test_the_samples_that_a_kill_lost_are_made_and_change_no_weight(runs, tmp_path, state, samples):
    """Killed after an epoch's state, and after that of the end, which saves the LoRA once more and trains nothing."""
    train(tmp_path, "--resume", str(runs[0] / "made" / state))
    assert sorted(helpers.samples(tmp_path)) == sorted(helpers.samples(runs[0]))[-samples:]
    one, two = (helpers.tensors(out / "made/tiny.safetensors") for out in (tmp_path, runs[0]))
    assert one == two


def test_a_state_that_musubi_tuner_wrote_alone_is_resumed_at_its_step(runs, tmp_path):
    state = helpers.stripped(runs[0] / "made/tiny-step00000006-state", tmp_path)
    result = train(tmp_path / "out", "--resume", str(state))
    assert "was saved without hangproof: it is resumed after step 6" in result.log
    assert sorted(helpers.learning_rates(tmp_path / "out")) == list(range(7, STEPS + 1))
