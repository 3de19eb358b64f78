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
import tiny_sd_scripts

from guards import snapshots
from runs.paths import ROOT

pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm"),
]
PACE_S = "0.75"  # tiny weights, but steps as long as real ones: a snapshot may cost 1 % of them
KILLS = int(os.environ.get("KILLS", "20"))


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


def moments(draw):
    """When each attempt dies: at a random time, in the middle of a snapshot, or of a save."""
    found = [
        f"{what} {draw.randint(1, most)}" for what, most in (("snapshot", 3), ("save", 6)) for _ in range(KILLS // 4)
    ]
    found += [f"time {3.5 * float(PACE_S) * draw.random():.3f}" for _ in range(KILLS - len(found))]
    draw.shuffle(found)
    return found


def killed_at_random(run, ring):
    """Kill KILLS times, then let it finish. Returns (the steps that were resumed from, the moments)."""
    seed = random.randrange(10**6)
    resumed, chosen = [], moments(random.Random(seed))
    print(f"moments drawn with seed {seed}: {chosen}")
    for number, moment in enumerate([*chosen, "never"], 1):
        resume, env, step = variables(ring, number)
        resumed.append(step)
        done = run(env | {"TEST_KILL": moment}, *resume)
        assert done.code == (0 if moment == "never" else -signal.SIGKILL), (moment, done.log[-3000:])
        assert "Saving current state to /dev/shm" not in done.log, "a snapshot does not fill the log"
    return resumed


@pytest.mark.parametrize("trainer", ["sd-scripts", "musubi"])
def test_killed_at_random_moments_it_goes_on_from_a_snapshot(tmp_path, ring, trainer):
    """The losses are those of the undisturbed run, the steps trained twice are few, and every state and LoRA is there."""
    tiny, batches = (tiny_musubi, 7) if trainer == "musubi" else (tiny_sd_scripts, 10)
    if reason := tiny.why_not():
        pytest.skip(reason)
    work, plain, killed = tiny.workdir(), tmp_path / "plain", tmp_path / "killed"
    more = ["--save_state", "--save_every_n_steps", "10", "--max_train_epochs", str(math.ceil(6 * KILLS / batches))]
    if trainer == "musubi":
        more += ["--num_timestep_buckets", "4", "--timestep_sampling", "uniform"]
        for folder in (plain, killed):
            tiny.cached(work, folder)

    def train(out, *resume, env=()):
        if trainer == "musubi":
            return musubi_helpers.train(out, *more, *resume, env=env)
        return resume_helpers.train(work, out, *more, *resume, env=env)

    undisturbed = train(plain)
    assert undisturbed.code == 0, undisturbed.log[-3000:]
    path = os.pathsep.join([tiny.environment(work)["PYTHONPATH"], str(ROOT / "tests/support")])
    resumed = killed_at_random(lambda env, *resume: train(killed, *resume, env=env | {"PYTHONPATH": path}), ring)
    repeated = resume_helpers.same_losses(plain, killed)
    print(f"{KILLS} kills, {repeated} steps repeated, resumed from {resumed}")
    assert repeated <= KILLS and resumed == sorted(resumed) and resumed[-1] > 0
    resume_helpers.same_output(plain, killed)
    assert snapshots.status(ring)["off"] == ""
