"""sd-scripts and musubi-tuner go on from a snapshot in memory, killed at any moment: every loss to the digit."""

import math
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

pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm"),
]
SD = pytest.mark.skipif(bool(tiny.why_not()), reason=tiny.why_not() or "-")
MUSUBI = pytest.mark.skipif(bool(tiny_musubi.why_not()), reason=tiny_musubi.why_not() or "-")
PACE_S = "0.75"  # tiny weights, but steps as long as real ones: a snapshot may cost 1 % of them
SAVES = ["--save_state", "--save_every_n_steps", "10"]
KILLS = [2, pytest.param(20, marks=pytest.mark.long)]


@pytest.fixture
def ring():
    folder = Path(tempfile.mkdtemp(prefix="hangproof-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def variables(ring, number):
    """(--resume …, the environment) of an attempt, as the monitor chooses them."""
    env = {snapshots.FOLDER: str(ring), "HANGPROOF_ATTEMPT": str(number), "HANGPROOF_HEARTBEAT": str(ring / "beats")}
    env |= {"HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_PACE_S": PACE_S}
    found = next(iter(snapshots.headers(ring).items()), None)
    if found is None:
        return [], env, 0
    return ["--resume", str(ring / found[1].name)], env | {snapshots.RECORD: str(found[0])}, found[1].step


def killed_at_random(run, ring, kills):
    """Kill after 2 to 5 micro-batches, `kills` times, then let it finish. Returns the steps that were resumed from."""
    seed = random.randrange(10**6)
    draw, resumed = random.Random(seed), []
    print(f"moments drawn with seed {seed}")
    while len(resumed) <= kills:
        resume, env, step = variables(ring, len(resumed) + 1)
        resumed.append(step)
        done = run(draw.randint(2, 5) if len(resumed) <= kills else 0, env, *resume)
        assert done.code == (-signal.SIGKILL if len(resumed) <= kills else 0), done.log[-3000:]
        assert "Saving current state to /dev/shm" not in done.log, "a snapshot does not fill the log"
    return resumed


def compare(plain, killed, kills, planned, resumed):
    """The losses are those of the undisturbed run, and the steps trained twice are few."""
    expected = {(epoch, step): loss for epoch, step, loss in tiny.losses(plain / "losses")}
    found = tiny.losses(killed / "losses")
    assert [entry for entry in found if expected[entry[0], entry[1]] != entry[2]] == []
    assert {(e, s) for e, s, _ in found} == set(expected) and len(expected) == planned
    print(f"{kills} kills, {len(found) - planned} steps repeated, resumed from {resumed}")
    # The kill comes when a step is counted, and before its snapshot: the worst moment.
    assert len(found) - planned <= kills + 2 and resumed == sorted(resumed) and resumed[-1] > 0
    for name in ("tiny.safetensors", "tiny-step00000010-state/model.safetensors"):
        assert resume_helpers.tensors(killed / "made" / name) == resume_helpers.tensors(plain / "made" / name), name


@SD
@pytest.mark.parametrize("kills", KILLS)
def test_sd_scripts(tmp_path, ring, kills):
    work, plain, killed = tiny.workdir(), tmp_path / "plain", tmp_path / "killed"
    epochs = math.ceil(3 * max(kills, 10) / 10)
    more = [*SAVES, "--max_train_epochs", str(epochs)]
    undisturbed = resume_helpers.train(work, plain, *more)
    assert undisturbed.code == 0, undisturbed.log[-3000:]

    def run(die_after, env, *resume):
        return resume_helpers.train(work, killed, *more, *resume, die_after=die_after, env=env.items())

    resumed = killed_at_random(run, ring, kills)
    compare(plain, killed, kills, 10 * epochs, resumed)
    assert snapshots.status(ring)["off"] == ""


@MUSUBI
@pytest.mark.parametrize("kills", KILLS)
def test_musubi(tmp_path, ring, kills):
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    epochs = math.ceil(3 * max(kills, 10) / 7)
    more = [*SAVES, "--max_train_epochs", str(epochs), "--num_timestep_buckets", "4", "--timestep_sampling", "uniform"]
    for folder in (plain, killed):
        tiny_musubi.cached(tiny_musubi.workdir(), folder)
    assert musubi_helpers.train(plain, *more).code == 0

    def run(die_after, env, *resume):
        return musubi_helpers.train(killed, *more, *resume, die_after=die_after, env=env.items())

    resumed = killed_at_random(run, ring, kills)
    compare(plain, killed, kills, 7 * epochs, resumed)
    assert snapshots.status(ring)["off"] == ""
