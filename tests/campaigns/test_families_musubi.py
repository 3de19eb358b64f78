"""Each model family of musubi-tuner, trained for real on tiny weights: guarded as unguarded, killed five times as not killed.

Two commands make caches, one trains. A run is killed once in each caching command and three times in training.
"""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import musubi_helpers
import patches_helpers as helpers
import pytest
import resume_helpers
import tiny_musubi as tiny

from guards import checkpoint
from sd_scripts_patches import trainer_state

pytestmark = [
    pytest.mark.skipif(bool(tiny.why_not()), reason=tiny.why_not() or "-"),
    pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL as on Unix"),
    pytest.mark.timeout(1800),
]
KILLS, INTERVAL, EPOCHS, IMAGES, DIES_AT = 3, 3, 3, 7, 4
AS_MUSUBI_ALONE = ("zimage", "qwen_image")
"""Their caching commands are killed without the patch that writes a cache aside: half a file is left under its name."""


def arguments(family):
    samples = ["--sample_every_n_epochs", "1", "--sample_prompts", str(tiny.workdir(family) / "prompts.txt")]
    saves = ["--save_state", "--save_every_n_steps", str(INTERVAL), "--save_every_n_epochs", "1"]
    return [*saves, "--max_train_epochs", str(EPOCHS), *samples]


def trained(family, folder, patched):
    tiny.cached(tiny.workdir(family), folder, family=family)
    result = musubi_helpers.train(folder, *arguments(family), family=family, patched=patched)
    assert result.code == 0, result.log[-3000:]
    assert "skipped" not in result.log, result.log[-3000:]  # of a sample that failed
    return folder


def files(folder):
    """Return the caches with the time at which each was written."""
    return {path.name: path.stat().st_mtime_ns for path in (folder / "cache").glob("[!.]*.safetensors")}


def killed(family, folder):
    """Returns the folder and, for each caching command: its log after the kill, the files of before, the half-written one."""
    folder.mkdir(parents=True)
    tiny.dataset(folder, tiny.workdir(family) / "images", family=family)
    alone = ["--hangproof_without=caches"] if family in AS_MUSUBI_ALONE else []
    caching = []
    for script in tiny.caching(folder / "dataset.toml", family=family):
        (folder / "cache").mkdir(exist_ok=True)
        others = set(files(folder))
        first = musubi_helpers.cache(folder, script, *alone, die_after=DIES_AT, family=family)
        assert first.code == -signal.SIGKILL, first.log[-3000:]
        written = {name: at for name, at in files(folder).items() if name not in others}
        hidden = [path.name for path in (folder / "cache").glob(".*")]
        second = musubi_helpers.cache(folder, script, "--skip_existing", family=family)
        assert second.code == 0, second.log[-3000:]
        caching.append((second.log, written, hidden))
    kills = musubi_helpers.killed_and_resumed(folder, *arguments(family), kills=KILLS, seed=1, family=family)
    assert kills == KILLS
    return folder, caching


@pytest.fixture(scope="module")
def started(request, tmp_path_factory):
    base = tmp_path_factory.mktemp("families")

    def run(family):
        tiny.workdir(family)
        with ThreadPoolExecutor(2) as pool:
            chain = pool.submit(killed, family, base / family / "killed")
            plain = trained(family, base / family / "plain", patched=False)
            guarded = trained(family, base / family / "guarded", patched=True)
            return plain, guarded, *chain.result()

    with helpers.ahead(request, "runs", {f: partial(run, f) for f in tiny.FAMILIES}, at_once=1) as futures:
        yield futures


@pytest.fixture
def runs(request, started):
    return request.param, *started[request.param].result()


each = helpers.asks("runs", *tiny.FAMILIES)


@each
def test_losses_weights_and_samples_are_those_of_the_family_unguarded(runs):
    _, plain, guarded, _, _ = runs
    losses = tiny.losses(plain / "losses")
    assert len(losses) == IMAGES * EPOCHS and len({loss for _, _, loss in losses}) > 15
    assert tiny.losses(guarded / "losses") == losses
    assert resume_helpers.names(plain) == resume_helpers.names(guarded)
    one, other = (resume_helpers.tensors(folder / "made/tiny.safetensors") for folder in (plain, guarded))
    assert len(one) >= 6 and one == other
    pictures = [resume_helpers.samples(folder) for folder in (plain, guarded)]
    assert len(pictures[0]) == EPOCHS and pictures[0] == pictures[1]


@each
def test_a_killed_caching_command_leaves_no_half_file_and_repeats_nothing(runs):
    family, _, _, folder, caching = runs
    made = {path.name: resume_helpers.tensors(path) for path in (tiny.workdir(family) / "cache").iterdir()}
    assert {path.name: resume_helpers.tensors(path) for path in (folder / "cache").glob("[!.]*.safetensors")} == made
    left = {path.name for path in (folder / "cache").iterdir()} - set(made)
    for log, written, hidden in caching:
        now = files(folder)
        again = [name for name, at in written.items() if now[name] != at]
        if family in AS_MUSUBI_ALONE:
            assert len(written) == DIES_AT and len(again) == 1 and hidden == []
            assert f"{folder / 'cache' / again[0]} is damaged (" in log and f"renamed to {again[0]}.corrupt" in log
            left.remove(f"{again[0]}.corrupt")
        else:
            assert len(written) == DIES_AT - 1 and again == [] and len(hidden) == 1
            assert f"removed {folder / 'cache' / hidden[0]}, which a killed process left" in log
    assert left == set()


@each
def test_three_kills_in_training_give_the_undisturbed_losses_and_learning_rates(runs):
    _, _, guarded, folder, _ = runs
    plain, again = tiny.losses(guarded / "losses"), tiny.losses(folder / "losses")
    assert 0 < len(again) - len(plain) <= KILLS * INTERVAL
    expected = {(epoch, step): loss for epoch, step, loss in plain}
    assert [entry for entry in again if expected[entry[0], entry[1]] != entry[2]] == []
    assert {(epoch, step) for epoch, step, _ in again} == set(expected)
    rates = resume_helpers.learning_rates(guarded)
    assert len(rates) == IMAGES * EPOCHS and resume_helpers.learning_rates(folder) == rates


@each
def test_three_kills_in_training_give_the_undisturbed_names_states_and_weights(runs):
    _, _, guarded, folder, _ = runs
    names = resume_helpers.names(guarded)
    assert resume_helpers.names(folder) == names
    assert resume_helpers.samples(folder) == resume_helpers.samples(guarded)
    for name in names:
        if name.endswith(".safetensors"):
            one, other = (resume_helpers.tensors(made / "made" / name) for made in (guarded, folder))
            assert one == other, name
        elif name.endswith("-state"):
            one, other = (resume_helpers.state_json(made, name, trainer_state.FILE) for made in (guarded, folder))
            assert one == other and checkpoint.problems(folder / "made" / name, deep=True) == [], name
    assert os.path.isdir(folder / "made/tiny-state")
