"""A killed and resumed run of the real FLUX trainer equals the uninterrupted one: steps, losses, LR, names, weights."""

import pytest
import resume_helpers as helpers
import tiny_sd_scripts as tiny

from guards import checkpoint, heartbeat
from sd_scripts_patches import trainer_state

EPOCHS = {1: 3, 2: 4}  # by gradient accumulation: 30 and 20 steps
SAVES = ["--save_state", "--save_every_n_steps", str(helpers.INTERVAL), "--save_every_n_epochs", "1"]
LOADING = {1: ["--flip_aug"], 2: ["--persistent_data_loader_workers"]}  # the second is what the presets use


@pytest.fixture(scope="module")
def train(each_work):
    """train(accumulation, out, *more): one process; no workers for accumulation 1, two that stay for 2."""

    def one(accumulation, out, *more, **given):
        steps = ["--max_train_epochs", str(EPOCHS[accumulation]), "--gradient_accumulation_steps", str(accumulation)]
        steps += ["--sample_every_n_epochs", "1", "--sample_prompts", str(each_work / "prompts.txt")]
        given["max_data_loader_n_workers"] = str(2 * (accumulation - 1))
        return helpers.train(each_work, out, *SAVES, *LOADING[accumulation], *steps, *more, **given)

    return one


@pytest.fixture(scope="module")
def runs(train, tmp_path_factory):
    return helpers.pairs(train, tmp_path_factory.mktemp("resume"))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_killed_run_has_every_loss_rate_lora_state_and_sample_of_the_uninterrupted_one(runs, accumulation):
    plain, killed = runs[accumulation]
    helpers.check_pair(plain, killed, accumulation, 10, EPOCHS[accumulation])
    for name in (name for name in helpers.names(plain) if name.endswith("-state")):
        one, two = (helpers.state_json(out, name, "train_state.json") for out in (plain, killed))
        assert one == two and ("-step" not in name or one["current_step"] == int(name[9:17])), name


def test_a_stop_saves_its_step_and_the_rest_equals_an_uninterrupted_run(train, runs, tmp_path):
    """Stopped at step 4, between two saves."""
    env = {"HANGPROOF_HEARTBEAT": str(tmp_path / "hb"), "HANGPROOF_INJECT": "patches_injectors:stop_at_four"}
    stopped = train(1, tmp_path, env=env)
    state = checkpoint.newest_valid(tmp_path / "made")
    assert stopped.code == 3 and state.name == "tiny-step00000004-state", stopped.log[-2000:]
    (beat,) = heartbeat.read_all(tmp_path / "hb")
    assert (beat.outcome, beat.step) == ("stopped", 4)
    done = train(1, tmp_path, "--resume", str(state))
    assert done.code == 0, done.log[-2000:]
    state.rename(tmp_path / state.name)
    helpers.same_output(runs[1][0], tmp_path)


def test_a_state_of_plain_sd_scripts_continues_at_its_true_step(train, runs, tmp_path):
    """The step in its JSON is too low, as after a second plain resume. The LR scheduler has the right one, which is logged."""
    plain = runs[1][0]
    state = helpers.stripped(plain / "made/tiny-step00000012-state", tmp_path, current_epoch=2, current_step=2)
    result = train(1, tmp_path / "out", "--resume", str(state))
    assert result.code == 0, result.log[-2000:]
    rest = {step: lr for step, lr in helpers.learning_rates(plain).items() if step > 12}
    assert helpers.learning_rates(tmp_path / "out") == rest
    warning = next(line for line in result.log.splitlines() if "was saved without hangproof" in line)
    assert "train_state.json has 2, the LR scheduler 12; 12 is used" in warning and "order of the images" in warning


def test_an_epoch_state_of_plain_sd_scripts_gives_the_uninterrupted_losses(train, runs, tmp_path):
    plain = runs[1][0]
    state = helpers.stripped(plain / "made/tiny-000002-state", tmp_path)
    result = train(1, tmp_path / "out", "--resume", str(state))
    assert result.code == 0, result.log[-2000:]
    assert tiny.losses(tmp_path / "out/losses") == [line for line in tiny.losses(plain / "losses") if line[0] == 2]
    # An epoch's state is saved before its samples are made. Here none of epoch 2's are in the output folder.
    samples = helpers.samples(plain)
    assert helpers.samples(tmp_path / "out") == {name: samples[name] for name in ("tiny_e000002_00", "tiny_e000003_00")}


def test_a_finished_run_that_is_resumed_trains_nothing_and_exits_with_0(train, runs, tmp_path):
    plain = runs[2][0]
    result = train(2, tmp_path, "--resume", str(plain / "made/tiny-state"))
    assert result.code == 0 and not (tmp_path / "losses").exists(), result.log[-2000:]
    one, two = (helpers.tensors(out / "made/tiny.safetensors") for out in (tmp_path, plain))
    assert one == two
    place, before = (helpers.state_json(out, "tiny-state", trainer_state.FILE) for out in (tmp_path, plain))
    counts = ("step", "epoch", "batch", "epoch_over", "losses", "epoch_start")
    assert {c: place[c] for c in counts} == {c: before[c] for c in counts}
