"""Several processes of kohya's trainers, on tiny weights: the same training as one process, and nothing hangs or is repeated."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import resume_helpers
import tiny_musubi
import tiny_sd_scripts
from world_helpers import at_node, difference, exported, free_port, launcher, losses, run

from guards import checkpoint, heartbeat

TESTS = Path(__file__).resolve().parents[1] / "support"
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


def train(backend: str, out: Path, processes: int, *more: str, fault: str = "", env=(), nodes: int = 1, **changed: str):
    """Train with `processes` processes on each of so many machines, as their scripts start them.

    Output, losses and metrics are in `out`. All machines are this one; the result is that of the first one.
    """
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "HANGPROOF_RUN": str(out),
        "HANGPROOF_HEARTBEAT": str(out / "beats"),
        **exported(processes),
        **dict(env),
    }
    if fault:
        settings |= {"HANGPROOF_INJECT": "world_faults:inject", "WORLD_FAULT": fault}
    if backend == "musubi":
        tiny, work = tiny_musubi, tiny_musubi.workdir()
        config = out / "dataset.toml"
        if not config.exists():
            tiny.cached(work, out)
        script, model = tiny.trainer(), "z-image"
        line = tiny.arguments(work, config, out / "made", *more, **changed)
    else:
        tiny, work = tiny_sd_scripts, tiny_sd_scripts.workdir()
        script, model = "flux_train_network.py", "flux-dev"
        line = tiny.arguments(work, out / "made", *more, **changed)
    variables = tiny.environment(work, **settings)
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(TESTS)])
    rest = ["-m", "sd_scripts_patches", str(tiny.checkout() / script), *line]
    words = launcher(processes, backend, nodes=nodes, model=model)
    port = free_port()
    with ThreadPoolExecutor(nodes) as pool:
        ranks = [[str(tiny.python()), *at_node(words, node, port), *rest] for node in range(nodes)]
        first, *_ = pool.map(lambda line: run(line, variables, tiny.checkout()), ranks)
    return first


def one(backend: str, out: Path, accumulation: int, *more: str, **changed: str) -> list[float]:
    """The losses of one process that accumulates the gradients of so many batches, with the random numbers of several."""
    done = train(backend, out, 1, *more, "--gradient_accumulation_steps", str(accumulation), env=BY_BATCH, **changed)
    assert done.returncode == 0, done.stdout[-3000:]
    return losses(out)


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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
