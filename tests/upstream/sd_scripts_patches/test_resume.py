"""A stopped, killed and resumed run of the FLUX trainer equals the uninterrupted one: losses, LR, names, weights.

With the first version of sd-scripts without gradient accumulation and workers, with the second one with both.
tests/campaigns/test_epoch_ends.py has all combinations.
"""

import pytest
import resume_helpers as helpers
import tiny_sd_scripts as tiny

from sd_scripts_patches import trainer_state

VERSIONS, EPOCHS = tiny.checkouts(), 3
SAVES = ["--save_state", "--save_every_n_steps", str(helpers.INTERVAL), "--save_every_n_epochs", "1"]
LOADING = {
    1: ["--flip_aug"],
    2: ["--persistent_data_loader_workers", "--optimizer_type", "AdamWScheduleFree"],  # workers as in the presets
}


@pytest.fixture(scope="module")
def accumulation(sd_scripts):
    return 1 + VERSIONS.index(sd_scripts)


@pytest.fixture(scope="module")
def train(accumulation, each_work):
    """train(out, *more): one process."""
    flags = [*SAVES, *LOADING[accumulation], "--max_train_epochs", str(EPOCHS)]
    flags += ["--gradient_accumulation_steps", str(accumulation)]
    flags += ["--sample_every_n_epochs", "1", "--sample_prompts", str(each_work / "prompts.txt")]
    flags += ["--max_data_loader_n_workers", str(2 * (accumulation - 1))]
    return lambda out, *more, **given: helpers.train(each_work, out, *flags, *more, **given)


@pytest.fixture(scope="module")
def runs(train, tmp_path_factory):
    return helpers.disturbed(train, tmp_path_factory.mktemp("resume"))


def test_a_disturbed_run_has_every_loss_rate_lora_state_and_sample_of_the_uninterrupted_one(runs, accumulation):
    helpers.same_run(*runs, accumulation, 10, EPOCHS)
    for name in (name for name in helpers.names(runs[0]) if name.endswith("-state")):
        one, two = (helpers.state_json(out, name, "train_state.json") for out in runs)
        assert one == two and ("-step" not in name or one["current_step"] == int(name[9:17])), name


def test_a_state_of_plain_sd_scripts_continues_at_its_true_step(train, runs, accumulation, tmp_path):
    """The step in its JSON is too low, as after a second plain resume. The log says that the LR scheduler is right.
    A schedule-free optimizer has none."""
    step, counted = {1: (2, "train_state.json has 2, the LR scheduler 12; 12 is used"), 2: (12, "")}[accumulation]
    state = helpers.stripped(runs[0] / "made/tiny-step00000012-state", tmp_path, current_epoch=2, current_step=step)
    result = train(tmp_path / "out", "--resume", str(state))
    rest = {step: lr for step, lr in helpers.learning_rates(runs[0]).items() if step > 12}
    assert helpers.learning_rates(tmp_path / "out") == rest
    warning = next(line for line in result.log.splitlines() if "was saved without hangproof" in line)
    assert counted in warning and "order of the images" in warning


def test_an_epoch_state_of_plain_sd_scripts_gives_the_uninterrupted_losses(train, runs, tmp_path):
    state = helpers.stripped(runs[0] / "made/tiny-000002-state", tmp_path)
    train(tmp_path / "out", "--resume", str(state))
    assert tiny.losses(tmp_path / "out/losses") == [line for line in tiny.losses(runs[0] / "losses") if line[0] == 2]
    # An epoch's state is saved before its samples are made. Here none of epoch 2's are in the output folder.
    samples = helpers.samples(runs[0])
    assert helpers.samples(tmp_path / "out") == {name: samples[name] for name in ("tiny_e000002_00", "tiny_e000003_00")}


def test_a_finished_run_that_is_resumed_trains_nothing_and_exits_with_0(train, runs, tmp_path):
    result = train(tmp_path, "--resume", str(runs[0] / "made/tiny-state"))
    assert not (tmp_path / "losses").exists(), result.log[-2000:]
    one, two = (helpers.tensors(out / "made/tiny.safetensors") for out in (tmp_path, runs[0]))
    assert one == two
    place, before = (helpers.state_json(out, "tiny-state", trainer_state.FILE) for out in (tmp_path, runs[0]))
    counts = ("step", "epoch", "batch", "epoch_over", "losses", "epoch_start")
    assert {c: place[c] for c in counts} == {c: before[c] for c in counts}
