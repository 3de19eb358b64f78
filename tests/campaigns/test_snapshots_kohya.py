"""sd-scripts and musubi-tuner go on from a snapshot in memory, killed at any moment: every loss to the digit."""

import math
import os
import random
import shutil
import signal
import tempfile
from pathlib import Path

import musubi_helpers
import pytest
import resume_helpers
import tiny_musubi
import tiny_sd_scripts as tiny

from guards import snapshots
from runs.paths import ROOT

pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm"),
]
SD = pytest.mark.skipif(bool(tiny.why_not()), reason=tiny.why_not() or "-")
MUSUBI = pytest.mark.skipif(bool(tiny_musubi.why_not()), reason=tiny_musubi.why_not() or "-")
PACE_S = "0.75"  # tiny weights, but steps as long as real ones: a snapshot may cost 1 % of them
SAVES = ["--save_state", "--save_every_n_steps", "10"]
KILLS = [3, 20]


@pytest.fixture
def ring():
    folder = Path(tempfile.mkdtemp(prefix="hangproof-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def variables(ring, number):
    """(--resume …, the environment) of an attempt, as the monitor chooses them."""
    env = {snapshots.FOLDER: str(ring), "HANGPROOF_ATTEMPT": str(number), "HANGPROOF_HEARTBEAT": str(ring / "beats")}
    env |= {"HANGPROOF_INJECT": "random_kills:fire", "HANGPROOF_PACE_S": PACE_S}
    found = next(iter(snapshots.headers(ring).items()), None)
    if found is None:
        return [], env, 0
    return ["--resume", str(ring / found[1].name)], env | {snapshots.RECORD: str(found[0])}, found[1].step


def with_tests(env):
    """The variable with which a training finds random_kills."""
    return {"PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], str(ROOT / "tests/support")])}


def moments(kills, draw):
    """When each attempt dies: at a random time, in the middle of a snapshot, or of a save."""
    kinds = [("time", 3.5 * float(PACE_S) * draw.random()) for _ in range(kills - 2 * (kills // 4))]
    kinds += [(what, draw.randint(1, most)) for what, most in (("snapshot", 3), ("save", 6)) for _ in range(kills // 4)]
    draw.shuffle(kinds)
    return [f"{what} {when:.3f}" if what == "time" else f"{what} {when}" for what, when in kinds]


def killed_at_random(run, ring, kills):
    """Kill `kills` times, then let it finish. Returns (the steps that were resumed from, the moments)."""
    seed = random.randrange(10**6)
    resumed, chosen = [], moments(kills, random.Random(seed))
    print(f"moments drawn with seed {seed}: {chosen}")
    for number, moment in enumerate([*chosen, "never"], 1):
        resume, env, step = variables(ring, number)
        resumed.append(step)
        done = run(env | {"TEST_KILL": moment}, *resume)
        assert done.code == (0 if moment == "never" else -signal.SIGKILL), (moment, done.log[-3000:])
        assert "Saving current state to /dev/shm" not in done.log, "a snapshot does not fill the log"
    return resumed


def compare(plain, killed, kills, planned, resumed):
    """The losses are those of the undisturbed run, the steps trained twice are few, and every state and LoRA is there."""
    expected = {(epoch, step): loss for epoch, step, loss in tiny.losses(plain / "losses")}
    found = tiny.losses(killed / "losses")
    assert [entry for entry in found if expected[entry[0], entry[1]] != entry[2]] == []
    assert {(e, s) for e, s, _ in found} == set(expected) and len(expected) == planned
    print(f"{kills} kills, {len(found) - planned} steps repeated, resumed from {resumed}")
    assert len(found) - planned <= kills and resumed == sorted(resumed) and resumed[-1] > 0
    assert resume_helpers.names(killed) == resume_helpers.names(plain)
    for path in sorted((plain / "made").rglob("*.safetensors")):
        name = path.relative_to(plain / "made")
        assert resume_helpers.tensors(killed / "made" / name) == resume_helpers.tensors(path), name


@SD
@pytest.mark.parametrize("kills", KILLS)
def test_sd_scripts(tmp_path, ring, kills):
    work, plain, killed = tiny.workdir(), tmp_path / "plain", tmp_path / "killed"
    epochs = math.ceil(6 * max(kills, 5) / 10)
    more = [*SAVES, "--max_train_epochs", str(epochs)]
    undisturbed = resume_helpers.train(work, plain, *more)
    assert undisturbed.code == 0, undisturbed.log[-3000:]

    def run(env, *resume):
        env |= with_tests(tiny.environment(work))
        return resume_helpers.train(work, killed, *more, *resume, env=env.items())

    resumed = killed_at_random(run, ring, kills)
    compare(plain, killed, kills, 10 * epochs, resumed)
    assert snapshots.status(ring)["off"] == ""


@MUSUBI
@pytest.mark.parametrize("kills", KILLS)
def test_musubi(tmp_path, ring, kills):
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    epochs = math.ceil(6 * max(kills, 5) / 7)
    more = [*SAVES, "--max_train_epochs", str(epochs), "--num_timestep_buckets", "4", "--timestep_sampling", "uniform"]
    for folder in (plain, killed):
        tiny_musubi.cached(tiny_musubi.workdir(), folder)
    assert musubi_helpers.train(plain, *more).code == 0

    def run(env, *resume):
        env |= with_tests(tiny_musubi.environment(tiny_musubi.workdir()))
        return musubi_helpers.train(killed, *more, *resume, env=env.items())

    resumed = killed_at_random(run, ring, kills)
    compare(plain, killed, kills, 7 * epochs, resumed)
    assert snapshots.status(ring)["off"] == ""
