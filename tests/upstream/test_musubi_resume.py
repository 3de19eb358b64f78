"""A killed and resumed run of the real musubi-tuner equals the uninterrupted one: steps, losses, LR, names, weights."""

import shutil

import musubi_helpers
import pytest
import resume_helpers as helpers
import tiny_musubi as tiny

from guards import checkpoint, heartbeat

EPOCHS = {1: 3, 2: 5}  # by gradient accumulation: 21 and 20 steps
WORKERS = {1: [], 2: ["--max_data_loader_n_workers", "2", "--persistent_data_loader_workers"]}
TIMESTEPS = {1: ["--timestep_sampling", "uniform", "--num_timestep_buckets", "4"], 2: []}
SAVES = ["--save_state", "--save_every_n_steps", str(helpers.INTERVAL), "--save_every_n_epochs", "1"]


def train(accumulation, folder, *more, **given):
    """One process in `folder`, which gets caches and a data set first."""
    if not (folder / "dataset.toml").exists():
        tiny.cached(tiny.workdir(), folder)
    epochs = ["--max_train_epochs", str(EPOCHS[accumulation]), "--gradient_accumulation_steps", str(accumulation)]
    samples = ["--sample_every_n_epochs", "1", "--sample_prompts", str(tiny.workdir() / "prompts.txt")]
    flags = [*SAVES, *epochs, *WORKERS[accumulation], *TIMESTEPS[accumulation], *samples]
    return musubi_helpers.train(folder, *flags, *more, **given)


@pytest.fixture(scope="module")
def runs(musubi, tmp_path_factory):
    tiny.workdir()
    return helpers.pairs(train, tmp_path_factory.mktemp("musubi"))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_killed_run_has_every_loss_rate_lora_state_and_sample_of_the_uninterrupted_one(runs, accumulation):
    """musubi-tuner alone trains all steps once more."""
    helpers.check_pair(*runs[accumulation], accumulation, 7, EPOCHS[accumulation])


def test_a_state_that_musubi_tuner_wrote_alone_is_resumed_at_its_step(runs, tmp_path):
    state = helpers.stripped(runs[1][0] / "made/tiny-step00000012-state", tmp_path)
    result = train(1, tmp_path / "out", "--resume", str(state))
    assert result.code == 0, result.log[-3000:]
    assert "was saved without hangproof: it is resumed after step 12" in result.log
    assert sorted(helpers.learning_rates(tmp_path / "out")) == list(range(13, 22))


def test_a_damaged_state_is_refused_before_anything_is_loaded(runs, tmp_path):
    state = tmp_path / "tiny-step00000012-state"
    shutil.copytree(runs[1][0] / "made" / state.name, state)
    (state / "optimizer.bin").write_bytes(b"")
    result = train(1, tmp_path / "out", "--resume", str(state))
    assert result.code == 1 and f"--resume {state}: damaged: " in result.log and "Loading" not in result.log


def test_a_stop_request_saves_a_state_between_steps(runs, tmp_path):
    env = {"HANGPROOF_HEARTBEAT": str(tmp_path / "hb"), "HANGPROOF_INJECT": "patches_injectors:stop_at_four"}
    stopped = train(1, tmp_path, env=env)
    assert "stop requested: saving a state at step 4" in stopped.log, stopped.log[-3000:]
    (beat,) = heartbeat.read_all(tmp_path / "hb")
    assert (beat.outcome, beat.step) == ("stopped", 4)
    finished = train(1, tmp_path, "--resume", str(checkpoint.newest_valid(tmp_path / "made")))
    assert finished.code == 0 and helpers.same_losses(runs[1][0], tmp_path) == 0, finished.log[-3000:]
    one, two = (helpers.tensors(folder / "made/tiny.safetensors") for folder in (runs[1][0], tmp_path))
    assert one == two
