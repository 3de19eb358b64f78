"""A killed and resumed run of the real musubi-tuner equals the uninterrupted one: steps, losses, LR, names, weights."""

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import resume_helpers
import tiny_musubi as tiny
from musubi_helpers import killed_and_resumed, train

from guards import checkpoint, heartbeat
from sd_scripts_patches import trainer_state

pytestmark = [
    pytest.mark.skipif(bool(tiny.why_not()), reason=tiny.why_not() or "-"),
    pytest.mark.timeout(1800),  # the first test waits for all training processes
]
KILLS, INTERVAL, IMAGES = 5, 3, 7
EPOCHS = {1: 5, 2: 8}  # by gradient accumulation: 35 and 32 steps
WORKERS = {
    1: ["--max_data_loader_n_workers", "0"],
    2: ["--max_data_loader_n_workers", "2", "--persistent_data_loader_workers"],
}
TIMESTEPS = {1: ["--timestep_sampling", "uniform", "--num_timestep_buckets", "4"], 2: []}
SAVES = ["--save_state", "--save_every_n_steps", str(INTERVAL), "--save_every_n_epochs", "1"]


def arguments(accumulation):
    epochs = ["--max_train_epochs", str(EPOCHS[accumulation]), "--gradient_accumulation_steps", str(accumulation)]
    samples = ["--sample_every_n_epochs", "1", "--sample_prompts", str(tiny.workdir() / "prompts.txt")]
    return [*SAVES, *epochs, *WORKERS[accumulation], *TIMESTEPS[accumulation], *samples]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """For accumulation 1 (no workers) and 2 (two that stay): an uninterrupted run, and one killed five times at random."""
    base = tmp_path_factory.mktemp("musubi")
    tiny.workdir()

    def uninterrupted(accumulation):
        folder = base / f"uninterrupted-{accumulation}"
        tiny.cached(tiny.workdir(), folder)
        result = train(folder, *arguments(accumulation))
        assert result.code == 0, result.log[-3000:]
        return folder

    def interrupted(accumulation):
        folder = base / f"killed-{accumulation}"
        tiny.cached(tiny.workdir(), folder)
        assert killed_and_resumed(folder, *arguments(accumulation), kills=KILLS, seed=accumulation) == KILLS
        return folder

    with ThreadPoolExecutor(2) as pool:
        killed = pool.map(interrupted, (1, 2))
        plain = [uninterrupted(accumulation) for accumulation in (1, 2)]
        return dict(zip((1, 2), zip(plain, killed, strict=True), strict=True))


each = pytest.mark.parametrize("accumulation", [1, 2])


@each
def test_five_kills_repeat_at_most_what_was_not_yet_saved(runs, accumulation):
    plain, killed = (tiny.losses(folder / "losses") for folder in runs[accumulation])
    planned = IMAGES * EPOCHS[accumulation]
    assert len(plain) == planned
    assert 0 < len(killed) - planned <= KILLS * INTERVAL * accumulation


@each
def test_every_loss_is_the_uninterrupted_ones_to_the_digit(runs, accumulation):
    plain, killed = (tiny.losses(folder / "losses") for folder in runs[accumulation])
    expected = {(epoch, step): loss for epoch, step, loss in plain}
    assert [entry for entry in killed if expected[entry[0], entry[1]] != entry[2]] == []
    assert {(epoch, step) for epoch, step, _ in killed} == set(expected)


@each
def test_every_step_has_the_uninterrupted_ones_learning_rate(runs, accumulation):
    plain, killed = (resume_helpers.learning_rates(folder) for folder in runs[accumulation])
    assert len(plain) == math.ceil(IMAGES / accumulation) * EPOCHS[accumulation]
    assert len(set(plain.values())) > 15 and killed == plain


@each
def test_states_and_loras_have_the_same_names_and_the_same_weights(runs, accumulation):
    plain, killed = runs[accumulation]
    names = resume_helpers.names(plain)
    assert resume_helpers.names(killed) == names
    assert len([name for name in names if name.endswith(".safetensors")]) > 8
    for name in names:
        if name.endswith(".safetensors"):
            one, other = (resume_helpers.tensors(folder / "made" / name) for folder in (plain, killed))
            assert len(one) > 20 and one == other, name


@each
def test_each_state_verifies_and_holds_the_same_trainer_state(runs, accumulation):
    plain, killed = runs[accumulation]
    states = [name for name in resume_helpers.names(plain) if name.endswith("-state")]
    assert len(states) > 8
    for state in states:
        one, other = (resume_helpers.state_json(folder, state, trainer_state.FILE) for folder in (plain, killed))
        assert one == other, state
        assert checkpoint.problems(killed / "made" / state, deep=True) == []


@each
def test_the_samples_of_every_epoch_are_the_uninterrupted_ones(runs, accumulation):
    plain, killed = (resume_helpers.samples(folder) for folder in runs[accumulation])
    assert sorted(plain) == [f"tiny_e{epoch:06d}_00" for epoch in range(1, EPOCHS[accumulation] + 1)]
    assert killed == plain


def test_a_resumed_run_does_not_train_its_steps_again(runs, tmp_path):
    """musubi-tuner alone trains all 35 steps once more."""
    plain, _ = runs[1]
    tiny.cached(tiny.workdir(), tmp_path)
    state = plain / "made/tiny-step00000030-state"
    result = train(tmp_path, *arguments(1), "--resume", str(state))
    assert result.code == 0, result.log[-3000:]
    assert len(tiny.losses(tmp_path / "losses")) == 5
    assert sorted(resume_helpers.learning_rates(tmp_path)) == [31, 32, 33, 34, 35]


def test_a_state_that_musubi_tuner_wrote_alone_is_resumed_at_its_step(runs, tmp_path):
    plain, _ = runs[1]
    tiny.cached(tiny.workdir(), tmp_path)
    state = resume_helpers.stripped(plain / "made/tiny-step00000012-state", tmp_path)
    result = train(tmp_path, *arguments(1), "--resume", str(state))
    assert result.code == 0, result.log[-3000:]
    assert "was saved without hangproof: it is resumed after step 12" in result.log
    assert sorted(resume_helpers.learning_rates(tmp_path)) == list(range(13, 36))


def test_a_damaged_state_is_refused_before_anything_is_loaded(runs, tmp_path):
    plain, _ = runs[1]
    tiny.cached(tiny.workdir(), tmp_path)
    state = tmp_path / "tiny-step00000012-state"
    shutil.copytree(plain / "made" / state.name, state)
    (state / "optimizer.bin").write_bytes(b"")
    result = train(tmp_path, *arguments(1), "--resume", str(state))
    assert result.code == 1 and f"--resume {state}: damaged: " in result.log and "Loading" not in result.log


def test_a_stop_request_saves_a_state_between_steps(runs, tmp_path):
    tiny.cached(tiny.workdir(), tmp_path)
    env = {"HANGPROOF_HEARTBEAT": str(tmp_path / "hb"), "HANGPROOF_INJECT": "patches_injectors:stop_at_four"}
    stopped = train(tmp_path, *arguments(1), env=env)
    assert "stop requested: saving a state at step 4" in stopped.log, stopped.log[-3000:]
    (beat,) = heartbeat.read_all(tmp_path / "hb")
    assert (beat.outcome, beat.step) == ("stopped", 4)
    finished = train(tmp_path, *arguments(1), "--resume", str(checkpoint.newest_valid(tmp_path / "made")))
    assert finished.code == 0, finished.log[-3000:]
    plain = runs[1][0]
    assert tiny.losses(tmp_path / "losses") == tiny.losses(plain / "losses")
    one, other = (resume_helpers.tensors(folder / "made/tiny.safetensors") for folder in (plain, tmp_path))
    assert one == other


def test_metrics_have_one_line_for_each_step(runs):
    lines = [json.loads(line) for line in (runs[2][0] / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 33))
    assert [line["epoch"] for line in lines] == [1 + step // 4 for step in range(32)]
    assert all(math.isfinite(line["loss"]) and 0 < line["step_s"] < 60 for line in lines)
