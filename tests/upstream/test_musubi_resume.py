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

KILLS, INTERVAL, IMAGES = 2, 3, 7
EPOCHS = {1: 3, 2: 5}  # by gradient accumulation: 21 and 20 steps
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
def runs(musubi, tmp_path_factory):
    """For accumulation 1 (no workers) and 2 (two that stay): an uninterrupted run, and one killed twice at random."""
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


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_killed_run_has_every_loss_rate_lora_state_and_sample_of_the_uninterrupted_one(runs, accumulation):
    plain, killed = runs[accumulation]
    expected = {(epoch, step): loss for epoch, step, loss in tiny.losses(plain / "losses")}
    trained = tiny.losses(killed / "losses")
    assert len(expected) == IMAGES * EPOCHS[accumulation] and {(e, s) for e, s, _ in trained} == set(expected)
    assert [entry for entry in trained if expected[entry[0], entry[1]] != entry[2]] == []
    assert 0 < len(trained) - len(expected) <= KILLS * INTERVAL * accumulation, (
        "only what was not yet saved is repeated"
    )
    rates = resume_helpers.learning_rates(plain)
    assert len(rates) == math.ceil(IMAGES / accumulation) * EPOCHS[accumulation] and len(set(rates.values())) > 12
    assert resume_helpers.learning_rates(killed) == rates
    names = resume_helpers.names(plain)
    assert resume_helpers.names(killed) == names and sum(name.endswith("-state") for name in names) > 6
    for name in names:
        if name.endswith(".safetensors"):
            one, other = (resume_helpers.tensors(folder / "made" / name) for folder in (plain, killed))
            assert len(one) > 20 and one == other, name
        elif name.endswith("-state"):
            one, other = (resume_helpers.state_json(folder, name, trainer_state.FILE) for folder in (plain, killed))
            assert one == other and checkpoint.problems(killed / "made" / name, deep=True) == [], name
    pictures = resume_helpers.samples(plain)
    assert sorted(pictures) == [f"tiny_e{epoch:06d}_00" for epoch in range(1, EPOCHS[accumulation] + 1)]
    assert resume_helpers.samples(killed) == pictures
    lines = [json.loads(line) for line in (plain / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(rates)
    assert all(math.isfinite(line["loss"]) and line["step_s"] > 0 for line in lines)


def test_a_resumed_run_does_not_train_its_steps_again(runs, tmp_path):
    """musubi-tuner alone trains all 21 steps once more."""
    plain, _ = runs[1]
    tiny.cached(tiny.workdir(), tmp_path)
    state = plain / "made/tiny-step00000018-state"
    result = train(tmp_path, *arguments(1), "--resume", str(state))
    assert result.code == 0, result.log[-3000:]
    assert len(tiny.losses(tmp_path / "losses")) == 3
    assert sorted(resume_helpers.learning_rates(tmp_path)) == [19, 20, 21]


def test_a_state_that_musubi_tuner_wrote_alone_is_resumed_at_its_step(runs, tmp_path):
    plain, _ = runs[1]
    tiny.cached(tiny.workdir(), tmp_path)
    state = resume_helpers.stripped(plain / "made/tiny-step00000012-state", tmp_path)
    result = train(tmp_path, *arguments(1), "--resume", str(state))
    assert result.code == 0, result.log[-3000:]
    assert "was saved without hangproof: it is resumed after step 12" in result.log
    assert sorted(resume_helpers.learning_rates(tmp_path)) == list(range(13, 22))


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
