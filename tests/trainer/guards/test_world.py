"""Several processes of the built-in trainer: as many as asked for or none, and the same training as one process."""

import os
import signal
import sys

import pytest
from trainer_helpers import ROOT, environment, flags, fork, good, make_config, make_images, sha
from world_helpers import difference, exported, launcher, losses, run

from guards import checkpoint, heartbeat
from trainer import states, tiny_flux

pytestmark = pytest.mark.skipif(os.name == "nt", reason="gloo under torchrun is not set up for Windows here")
STEPS = 6  # two epochs: 10 batches make three steps of four, the last of them with two


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    config = make_config(folder / "dataset.toml", make_images(folder / "images"))
    return {"model": tiny_flux.ensure(folder / "models" / "tiny-flux"), "config": config}


def together(work, out, processes: int, fault: str = "", env=(), **changed):
    """Train with `processes` processes in `out`, as the script starts them."""
    (out / "run").mkdir(parents=True, exist_ok=True)
    argv = flags(work["model"], work["config"], out / "made", save_state=True, **{"max_train_steps": STEPS, **changed})
    watched = {"HANGPROOF_RUN": str(out / "run"), "HANGPROOF_HEARTBEAT": str(out / "beats"), **exported(processes)}
    if fault:
        watched |= {"HANGPROOF_INJECT": "world_faults:inject", "WORLD_FAULT": fault}
    command = [sys.executable, *launcher(processes), "-m", "trainer", *argv]
    return run(command, environment(**{**watched, **dict(env)}), ROOT)


def alone(work, out, accumulation: int):
    """Train with one process that accumulates the gradients of `accumulation` batches."""
    (out / "run").mkdir(parents=True)
    argv = flags(
        work["model"], work["config"], out / "made", max_train_steps=STEPS, gradient_accumulation_steps=accumulation
    )
    good(fork(argv, HANGPROOF_RUN=str(out / "run")))
    return losses(out / "run")


@pytest.mark.parametrize(
    ("processes", "accumulation"),
    [(2, 1), pytest.param(4, 1, marks=pytest.mark.long), pytest.param(2, 2, marks=pytest.mark.long)],
)
def test_n_processes_train_as_one_with_n_times_the_accumulation(work, tmp_path, processes, accumulation):
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


@pytest.mark.parametrize(
    ("wanted", "started"), [("3", 2), ("2", 1)], ids=["fewer than asked for", "one that should be two"]
)
def test_a_smaller_world_is_refused_by_every_rank_before_it_writes(work, tmp_path, wanted, started):
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


@pytest.mark.long
def test_a_group_that_accelerate_does_not_form_is_refused_by_every_rank(work, tmp_path):
    """As on a machine where accelerate finds no device to join by: the fault that made two runs of one."""
    env = {"HANGPROOF_INJECT": "blind:nothing", "PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"}
    (tmp_path / "blind.py").write_text(
        "from guards import world\nworld.choose_backend = lambda: ''\ndef nothing(*_): pass\n", encoding="utf-8"
    )
    done = together(work, tmp_path, 2, env=env)
    assert done.returncode == 1
    assert "the launcher started 2 processes, but accelerate joined 1 of them." in done.stdout
    assert not list((tmp_path / "made").glob("*.safetensors"))


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param("1", id="rank 1", marks=pytest.mark.long),
        pytest.param("0", id="rank 0", marks=pytest.mark.long),
        pytest.param("01", id="both", marks=pytest.mark.long),
    ],
)
def test_a_killed_group_ends_and_resumes_bit_for_bit(work, tmp_path, ranks, undisturbed):
    killed = together(work, tmp_path, 2, fault=f"kill@4:{ranks}", save_every_n_steps=2)
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


@pytest.mark.long
def test_a_rank_that_stands_still_ends_the_others_wait(work, tmp_path):
    """Rank 1 is stopped as by Ctrl-Z; rank 0 waits for it in the next step, and not for ever. The launcher ends rank 1."""
    done = together(work, tmp_path, 2, fault="stop@3:1", env={"HANGPROOF_PHASE_STEP_S": "6"})
    assert done.returncode == 1 and "waited 6 s for any progress in phase step" in done.stdout, done.stdout[-3000:]
    first = heartbeat.read_all(tmp_path / "beats")[0]
    assert (first.step, first.outcome) == (3, "deadline")


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
