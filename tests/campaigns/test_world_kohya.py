"""Several processes of kohya's trainers, on tiny weights: the same training as one process, and nothing hangs or is repeated."""

import os
import signal
from pathlib import Path

import pytest
import resume_helpers
import tiny_musubi
import tiny_sd_scripts
from world_helpers import difference, losses
from world_trainings import train

from guards import checkpoint, heartbeat

SD_SCRIPTS = pytest.param(
    "sd-scripts", marks=pytest.mark.skipif(bool(tiny_sd_scripts.why_not()), reason=tiny_sd_scripts.why_not() or "-")
)
MUSUBI = pytest.param(
    "musubi", marks=pytest.mark.skipif(bool(tiny_musubi.why_not()), reason=tiny_musubi.why_not() or "-")
)
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.name == "nt", reason="gloo under torchrun is not set up for Windows here"),
]
BY_BATCH = {"HANGPROOF_BATCH_SEEDS": "1"}
SAVES = ["--save_state", "--save_every_n_steps", "2"]


def one(backend: str, out: Path, accumulation: int, *more: str, **changed: str) -> list[float]:
    """The losses of one process that accumulates the gradients of so many batches, with the random numbers of several."""
    done = train(backend, out, 1, *more, "--gradient_accumulation_steps", str(accumulation), env=BY_BATCH, **changed)
    assert done.returncode == 0, done.stdout[-3000:]
    return losses(out)


@pytest.mark.parametrize("backend", [SD_SCRIPTS, MUSUBI])
@pytest.mark.parametrize("processes", [2, 4])
def test_n_processes_train_as_one_with_n_times_the_accumulation(backend, processes, tmp_path):
    """Three epochs of 10 or 7 images, which do not divide, with a warm-up; sd-scripts flips them while it reads."""
    more = ["--max_train_epochs", "3", "--lr_warmup_steps", "3", *(["--flip_aug"] if backend == "sd-scripts" else [])]
    alone = one(backend, tmp_path / "one", processes, *more)
    done = train(
        backend, tmp_path / "several", processes, *more, max_data_loader_n_workers="2" if processes == 2 else "0"
    )
    assert done.returncode == 0, done.stdout[-3000:]
    together = losses(tmp_path / "several")
    assert len(alone) >= 6 and difference(alone, together) < 1e-5
    print(f"{backend}, {processes} processes: {len(alone)} steps, largest difference {difference(alone, together):.2g}")
    assert (tmp_path / "several/made/tiny.safetensors").is_file()


@pytest.mark.parametrize("backend", [SD_SCRIPTS, MUSUBI])
def test_two_machines_train_as_one_process(backend, tmp_path):
    """Two launchers, each with one process, meet at the first one's address and port."""
    alone = one(backend, tmp_path / "one", 2, "--max_train_epochs", "2")
    done = train(backend, tmp_path / "two", 1, "--max_train_epochs", "2", nodes=2)
    assert done.returncode == 0, done.stdout[-3000:]
    assert difference(alone, losses(tmp_path / "two")) < 1e-5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """By trainer: a run of two processes, 8 steps in two epochs, made when it is asked for."""
    made: dict[str, Path] = {}

    def of(backend: str) -> Path:
        if backend not in made:
            out = tmp_path_factory.mktemp("undisturbed") / backend
            done = train(backend, out, 2, *SAVES, "--max_train_epochs", "2")
            assert done.returncode == 0, done.stdout[-3000:]
            made[backend] = out
        return made[backend]

    return of


@pytest.mark.parametrize("backend", [SD_SCRIPTS, MUSUBI])
@pytest.mark.parametrize("fault", ["kill@3:01", "kill@6:1", "kill@5:0", "request@2:1"])
def test_a_group_that_is_killed_or_stopped_resumes_bit_for_bit(backend, fault, tmp_path, undisturbed):
    """SIGKILL of both ranks or of one of them: the other one does not stay. A stop that one rank is asked for stops both."""
    killed = train(backend, tmp_path, 2, *SAVES, "--max_train_epochs", "2", fault=fault)
    assert killed.returncode not in (0, -signal.SIGKILL), killed.stdout[-2000:]
    state = checkpoint.newest_valid(tmp_path / "made", deep=True)
    assert state is not None
    if fault.startswith("request"):
        assert state.name == "tiny-step00000003-state"
        ended = [(b.rank, b.step, b.outcome) for b in heartbeat.read_all(tmp_path / "beats")]
        assert ended == [(0, 3, "stopped"), (1, 3, "stopped")]
    done = train(backend, tmp_path, 2, *SAVES, "--max_train_epochs", "2", "--resume", str(state))
    assert done.returncode == 0, done.stdout[-3000:]
    plain = undisturbed(backend)
    assert losses(tmp_path) == losses(plain)
    final = "made/tiny.safetensors"
    assert resume_helpers.tensors(tmp_path / final) == resume_helpers.tensors(plain / final)


@pytest.mark.parametrize("backend", [SD_SCRIPTS, MUSUBI])
def test_a_smaller_world_is_refused_before_anything_is_written(backend, tmp_path):
    done = train(backend, tmp_path, 1, "--max_train_steps", "2", env={"HANGPROOF_WORLD": "2"})
    assert done.returncode == 1
    assert (
        "hangproof: this run asks for 2 processes (nodes x gpus in run.toml), but the launcher started 1."
        in done.stdout
    )
    assert "Nothing was trained." in done.stdout
    assert not (tmp_path / "made").exists()
    (beat,) = heartbeat.read_all(tmp_path / "beats")
    assert beat.outcome == "failed" and beat.note.startswith("this run asks for 2 processes")
