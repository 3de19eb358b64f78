"""A killed and resumed run of the real FLUX trainer equals the uninterrupted one: steps, losses, LR, names, weights."""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import resume_helpers as helpers
import tiny_sd_scripts as tiny
from patches_helpers import ahead, asks

from guards import checkpoint, heartbeat
from sd_scripts_patches import trainer_state

KILLS, INTERVAL, IMAGES = 2, 3, 10
EPOCHS = {1: 3, 2: 4}  # by gradient accumulation: 30 and 20 steps
SAVES = ["--save_state", "--save_every_n_steps", str(INTERVAL), "--save_every_n_epochs", "1"]
WORKERS = {1: "0", 2: "2"}
LOADING = {1: ["--flip_aug"], 2: ["--persistent_data_loader_workers"]}  # the second is what the presets use


def arguments(accumulation, work):
    steps = ["--max_train_epochs", str(EPOCHS[accumulation]), "--gradient_accumulation_steps", str(accumulation)]
    samples = ["--sample_every_n_epochs", "1", "--sample_prompts", str(work / "prompts.txt")]
    return [*SAVES, *steps, *LOADING[accumulation], *samples]


@pytest.fixture(scope="module")
def runs(work, tmp_path_factory):
    """For accumulation 1 (no workers) and 2 (two that stay): an uninterrupted run, and one killed twice at random."""
    base = tmp_path_factory.mktemp("resume")

    def uninterrupted(accumulation):
        out = base / f"uninterrupted-{accumulation}"
        result = helpers.train(
            work, out, *arguments(accumulation, work), max_data_loader_n_workers=WORKERS[accumulation]
        )
        assert result.code == 0, result.log[-3000:]
        return out

    def interrupted(accumulation):
        out = base / f"killed-{accumulation}"
        killed = helpers.killed_and_resumed(
            work, out, *arguments(accumulation, work), kills=KILLS, seed=accumulation, max_data_loader_n_workers=WORKERS[accumulation]
        )  # fmt: skip
        assert killed == KILLS
        return out

    with ThreadPoolExecutor(2) as pool:
        killed = pool.map(interrupted, (1, 2))
        return {a: pair for a, pair in zip((1, 2), zip(map(uninterrupted, (1, 2)), killed, strict=True), strict=True)}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_killed_run_has_every_loss_rate_lora_state_and_sample_of_the_uninterrupted_one(runs, accumulation):
    """Each state also holds the same counts, averages, generators and order, so that a third and a tenth resume go on in the same way."""
    plain, killed = runs[accumulation]
    expected, found = ({(e, s): loss for e, s, loss in tiny.losses(out / "losses")} for out in (plain, killed))
    assert len(expected) == IMAGES * EPOCHS[accumulation] and found == expected
    trained = tiny.losses(killed / "losses")
    assert [entry for entry in trained if expected[entry[0], entry[1]] != entry[2]] == []
    assert 0 < len(trained) - len(expected) <= KILLS * INTERVAL * accumulation, (
        "only what was not yet saved is repeated"
    )
    rates = helpers.learning_rates(plain)
    assert len(rates) == math.ceil(IMAGES / accumulation) * EPOCHS[accumulation]
    assert helpers.learning_rates(killed) == rates
    names = helpers.names(plain)
    assert helpers.names(killed) == names and sum(name.endswith("-state") for name in names) > 8
    for name in names:
        if name.endswith(".safetensors"):
            assert helpers.tensors(killed / "made" / name) == helpers.tensors(plain / "made" / name), name
        elif name.endswith("-state"):
            for file in ("train_state.json", trainer_state.FILE):
                assert helpers.state_json(killed, name, file) == helpers.state_json(plain, name, file), (name, file)
            assert checkpoint.problems(killed / "made" / name, deep=True) == []
            if "-step" in name:
                assert helpers.state_json(plain, name, "train_state.json")["current_step"] == int(name[9:17])
    pictures = helpers.samples(plain)
    assert sorted(pictures) == [f"tiny_e{epoch:06d}_00" for epoch in range(1, EPOCHS[accumulation] + 1)]
    assert all(len(one) == 1 for one in pictures.values()) and helpers.samples(killed) == pictures


# More runs, resumed from states of those. They are functions, started together; each test checks the result of one.


def stopped(work, folder, plain):
    """Stopped on request at step 4, between two saves; then it finishes."""
    results, state = [], []
    for word in ("four", ""):
        env = {"HANGPROOF_HEARTBEAT": str(folder / f"hb{word}")}
        env |= {"HANGPROOF_INJECT": f"patches_injectors:stop_at_{word}"} if word else {}
        resume = ["--resume", str(state[-1])] if state else []
        results.append(helpers.train(work, folder / "out", *arguments(1, work), *resume, env=env))
        state.append(checkpoint.newest_valid(folder / "out" / "made"))
    return results, state


def plain_step_state(work, folder, plain):
    state = helpers.stripped(plain[1] / "made/tiny-step00000012-state", folder, current_epoch=2, current_step=2)
    return helpers.train(work, folder / "out", *arguments(1, work), "--resume", str(state))


def plain_epoch_state(work, folder, plain):
    state = helpers.stripped(plain[1] / "made/tiny-000002-state", folder)
    return helpers.train(work, folder / "out", *arguments(1, work), "--resume", str(state))


def finished_run(work, folder, plain):
    state, workers = plain[2] / "made/tiny-state", WORKERS[2]
    more = [*arguments(2, work), "--resume", str(state)]
    return helpers.train(work, folder / "out", *more, max_data_loader_n_workers=workers)


def state_without_json(work, folder, plain):
    state = helpers.stripped(plain[1] / "made/tiny-step00000003-state", folder)
    (state / "train_state.json").unlink()
    return helpers.train(work, folder / "out", *arguments(1, work), "--resume", str(state))


SCENARIOS = (stopped, plain_step_state, plain_epoch_state, finished_run, state_without_json)


@pytest.fixture(scope="module")
def scenarios(request, work, runs, tmp_path_factory):
    plain = {accumulation: pair[0] for accumulation, pair in runs.items()}
    folders = {scenario.__name__: tmp_path_factory.mktemp(scenario.__name__) for scenario in SCENARIOS}
    jobs = {scenario.__name__: partial(scenario, work, folders[scenario.__name__], plain) for scenario in SCENARIOS}
    with ahead(request, "scenario", jobs) as futures:
        yield folders, futures


@pytest.fixture
def scenario(request, scenarios):
    """(its folder, what the run's function returned)"""
    folders, futures = scenarios
    return folders[request.param], futures[request.param].result()


def runs_scenario(scenario):
    return asks("scenario", scenario.__name__)


@runs_scenario(stopped)
def test_a_stop_saves_its_step_and_the_rest_equals_an_uninterrupted_run(scenario, runs):
    folder, (results, states) = scenario
    plain, out = runs[1][0], folder / "out"
    assert [r.code for r in results] == [3, 0], results[-1].log[-2000:]
    assert states[0].name == "tiny-step00000004-state"
    (beat,) = heartbeat.read_all(folder / "hbfour")
    assert (beat.outcome, beat.step) == ("stopped", 4)
    assert helpers.names(out) == sorted({*helpers.names(plain), states[0].name})
    for name in helpers.names(plain):
        if name.endswith(".safetensors"):
            assert helpers.tensors(out / "made" / name) == helpers.tensors(plain / "made" / name), name


@runs_scenario(plain_step_state)
def test_a_state_of_plain_sd_scripts_continues_at_its_true_step(scenario, runs):
    """The step in its JSON is too low, as after a second plain resume. The LR scheduler has the right one, which is logged."""
    folder, result = scenario
    assert result.code == 0, result.log[-2000:]
    rest = {step: lr for step, lr in helpers.learning_rates(runs[1][0]).items() if step > 12}
    assert helpers.learning_rates(folder / "out") == rest
    assert "tiny-step00000015-state" in helpers.names(folder / "out")
    warning = next(line for line in result.log.splitlines() if "was saved without hangproof" in line)
    assert "train_state.json has 2, the LR scheduler 12; 12 is used" in warning and "order of the images" in warning


@runs_scenario(plain_epoch_state)
def test_an_epoch_state_of_plain_sd_scripts_gives_the_uninterrupted_losses(scenario, runs):
    folder, result = scenario
    assert result.code == 0, result.log[-2000:]
    uninterrupted = [line for line in tiny.losses(runs[1][0] / "losses") if line[0] == 2]
    assert tiny.losses(folder / "out/losses") == uninterrupted
    # An epoch's state is saved before its samples are made. Here none of epoch 2's are in the output folder.
    samples = helpers.samples(runs[1][0])
    assert helpers.samples(folder / "out") == {name: samples[name] for name in ("tiny_e000002_00", "tiny_e000003_00")}


@runs_scenario(finished_run)
def test_a_finished_run_that_is_resumed_trains_nothing_and_exits_with_0(scenario, runs):
    (folder, result), plain = scenario, runs[2][0]
    out = folder / "out"
    assert result.code == 0, result.log[-2000:]
    assert not (out / "losses").exists()
    assert helpers.tensors(out / "made/tiny.safetensors") == helpers.tensors(plain / "made/tiny.safetensors")
    place, before = (helpers.state_json(o, "tiny-state", trainer_state.FILE) for o in (out, plain))
    counts = ("step", "epoch", "batch", "epoch_over", "losses", "epoch_start")
    assert {c: place[c] for c in counts} == {c: before[c] for c in counts}


@runs_scenario(state_without_json)
def test_a_state_without_its_json_is_refused_before_anything_is_loaded(scenario):
    folder, result = scenario
    assert result.code == 1
    path = folder / "tiny-step00000003-state/train_state.json"
    assert f"{path} is missing, so the step of this state is unknown" in result.log
    assert "--initial_step N" in result.log and "Building Flux" not in result.log and "prepare images" not in result.log
