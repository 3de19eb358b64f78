"""Several processes of the built-in trainer: as many as asked for or none, and the same training as one process."""

import os
import signal

import pytest
from trainer_helpers import flags, fork, good, sha
from world_helpers import difference, losses
from world_trainings import STEPS, images_and_model, together

from guards import checkpoint, heartbeat
from trainer import states

pytestmark = pytest.mark.skipif(os.name == "nt", reason="gloo under torchrun is not set up for Windows here")


def alone(work, out, accumulation: int):
    """Train with one process that accumulates the gradients of `accumulation` batches."""
    (out / "run").mkdir(parents=True)
    argv = flags(
        work["model"], work["config"], out / "made", max_train_steps=STEPS, gradient_accumulation_steps=accumulation
    )
    good(fork(argv, HANGPROOF_RUN=str(out / "run")))
    return losses(out / "run")


def test_two_processes_train_as_one_with_twice_the_accumulation(work, tmp_path):
    processes, accumulation = 2, 2
    one = alone(work, tmp_path / "one", processes * accumulation)
    several = tmp_path / "several"
    done = together(work, several, processes, gradient_accumulation_steps=accumulation)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"PyTorch finds no GPU here: {processes} processes train together" in done.stdout
    assert len(one) == STEPS and difference(one, losses(several / "run")) < 1e-5
    beats = heartbeat.read_all(several / "beats")
    assert [(b.rank, b.world, b.step, b.outcome) for b in beats] == [
        (r, processes, STEPS, "done") for r in range(processes)
    ]
    assert done.stdout.count("saving checkpoint") == 1 and done.stdout.count("model saved.") == 1


def test_a_smaller_world_is_refused_by_every_rank_before_it_writes(work, tmp_path):
    wanted, started = "3", 2
    done = together(work, tmp_path, started, env={"HANGPROOF_WORLD": wanted})
    assert done.returncode == 1
    sentence = (
        f"error: this run asks for {wanted} processes (nodes x gpus in run.toml), but the launcher started {started}."
    )
    # The launcher kills the others as soon as the first one has refused, so they may not get to their own sentence.
    assert 1 <= done.stdout.count(sentence) <= started and "python -m runs render NAME" in done.stdout
    assert not (tmp_path / "made").exists() and not (tmp_path / "run" / "metrics.jsonl").exists()
    beats = heartbeat.read_all(tmp_path / "beats")
    assert "failed" in {b.outcome for b in beats} and not {b.outcome for b in beats} - {"failed", "running"}


def test_a_killed_group_ends_and_resumes_bit_for_bit(work, tmp_path, undisturbed):
    killed = together(work, tmp_path, 2, fault="kill@4:1", save_every_n_steps=2)
    assert killed.returncode not in (0, -signal.SIGKILL), killed.stdout[-2000:]
    state = checkpoint.newest_valid(tmp_path / "made", deep=True)
    assert state is not None
    done = together(work, tmp_path, 2, save_every_n_steps=2, resume=state)
    assert done.returncode == 0, done.stdout[-3000:]
    assert losses(tmp_path / "run") == losses(undisturbed / "run")
    assert sha(tmp_path / "made" / "tiny.safetensors") == sha(undisturbed / "made" / "tiny.safetensors")


@pytest.fixture(scope="module")
def undisturbed(work, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    assert together(work, out, 2, save_every_n_steps=2).returncode == 0
    return out


def test_a_state_of_two_processes_continues_on_one_with_twice_the_accumulation(work, tmp_path, undisturbed):
    state = undisturbed / "made" / "tiny-step00000004-state"
    (tmp_path / "run").mkdir()
    argv = flags(
        work["model"],
        work["config"],
        tmp_path / "made",
        max_train_steps=STEPS,
        gradient_accumulation_steps=2,
        resume=state,
    )
    done = good(fork(argv, HANGPROOF_RUN=str(tmp_path / "run")))
    assert "differs from an undisturbed run" not in done.stdout
    assert difference(losses(undisturbed / "run")[4:], losses(tmp_path / "run")) < 1e-5
    assert states.batches({"gradient_accumulation_steps": 2, "world": 1}) == 2


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return images_and_model(tmp_path_factory.mktemp("world"))
