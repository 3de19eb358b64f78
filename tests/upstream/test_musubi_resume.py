"""A killed and resumed run of the real musubi-tuner equals the uninterrupted one: steps, losses, LR, names, weights."""

import math
import shutil
from concurrent.futures import ThreadPoolExecutor

import musubi_helpers
import pytest
import resume_helpers as helpers
import tiny_musubi as tiny

from guards import checkpoint, heartbeat

KILLS, INTERVAL, IMAGES = 2, 3, 7
EPOCHS = {1: 3, 2: 5}  # by gradient accumulation: 21 and 20 steps
WORKERS = {1: [], 2: ["--max_data_loader_n_workers", "2", "--persistent_data_loader_workers"]}
TIMESTEPS = {1: ["--timestep_sampling", "uniform", "--num_timestep_buckets", "4"], 2: []}
SAVES = ["--save_state", "--save_every_n_steps", str(INTERVAL), "--save_every_n_epochs", "1"]


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
    """For accumulation 1 (no workers) and 2 (two that stay): an uninterrupted run, and one killed twice at random."""
    base = tmp_path_factory.mktemp("musubi")
    tiny.workdir()

    def pair(accumulation):
        plain, killed = base / f"plain-{accumulation}", base / f"killed-{accumulation}"
        done = train(accumulation, plain)
        assert done.code == 0, done.log[-3000:]

        def run(die_after, *resume):
            return train(accumulation, killed, *resume, die_after=die_after)

        helpers.until_done(run, killed / "made", KILLS, accumulation)
        return plain, killed

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((1, 2), pool.map(pair, (1, 2)), strict=True))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_killed_run_has_every_loss_rate_lora_state_and_sample_of_the_uninterrupted_one(runs, accumulation):
    """musubi-tuner alone trains all steps once more."""
    plain, killed = runs[accumulation]
    assert len(tiny.losses(plain / "losses")) == IMAGES * EPOCHS[accumulation]
    assert 0 < helpers.same_losses(plain, killed) <= KILLS * INTERVAL * accumulation, "only what was not yet saved"
    rates = helpers.learning_rates(plain)
    assert len(rates) == math.ceil(IMAGES / accumulation) * EPOCHS[accumulation] and len(set(rates.values())) > 12
    helpers.same_resumed(plain, killed)
    assert sorted(helpers.samples(plain)) == [f"tiny_e{n:06d}_00" for n in range(1, EPOCHS[accumulation] + 1)]


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
