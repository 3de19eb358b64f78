"""Several processes of one training, on tiny weights: they train as one process does, and nothing hangs."""

import functools
import os
import signal

import pytest
import resume_helpers
import tiny_musubi
import tiny_sd_scripts
import trainer_helpers
from monitor_helpers import events
from world_trainings import difference, losses, together, train

from guards import checkpoint, heartbeat, step_requests

MISSING = {"sd-scripts": tiny_sd_scripts.why_not(), "musubi": tiny_musubi.why_not()}
kohyas = pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=why or "-")) for name, why in MISSING.items()],
)
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.name == "nt", reason="gloo under torchrun is not set up for Windows here"),
]
ASKED = {"HANGPROOF_INJECT": "request_injectors:ask", "REQUESTS": "sample@2,state@3,save@5"}
BY_BATCH = {"HANGPROOF_BATCH_SEEDS": "1"}
SAVES = ["--save_state", "--save_every_n_steps", "2"]


def trained(backend: str, out, processes: int, *more: str, **changed) -> list[float]:
    done = train(backend, out, processes, *more, **changed)
    assert done.returncode == 0, done.stdout[-3000:]
    return losses(out)


def one(backend: str, out, accumulation: int, *more: str) -> list[float]:
    """The losses of one process that accumulates the gradients of so many batches, with random numbers of several."""
    return trained(backend, out, 1, *more, "--gradient_accumulation_steps", str(accumulation), env=BY_BATCH)


@kohyas
@pytest.mark.parametrize(("processes", "nodes"), [(2, 1), (4, 1), (1, 2)])
def test_n_processes_train_as_one_with_n_times_the_accumulation(backend, processes, nodes, tmp_path):
    """Three epochs of 10 or 7 images, which do not divide, with a warm-up; sd-scripts flips them while it reads.

    Of two machines, two launchers, each with one process, meet at the first one's address and port.
    """
    more = ["--max_train_epochs", "3", "--lr_warmup_steps", "3", *(["--flip_aug"] if backend == "sd-scripts" else [])]
    alone = one(backend, tmp_path / "one", processes * nodes, *more)
    changed = {"max_data_loader_n_workers": "2" if processes == 2 else "0", "nodes": nodes}
    several = trained(backend, tmp_path / "several", processes, *more, **changed)
    assert len(alone) >= 6 and difference(alone, several) < 1e-5
    print(f"{backend}, {processes} processes: {len(alone)} steps, largest difference {difference(alone, several):.2g}")
    assert (tmp_path / "several/made/tiny.safetensors").is_file()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """By trainer: a run of two processes, 8 steps in two epochs, made when it is asked for."""

    @functools.cache
    def of(backend: str):
        out = tmp_path_factory.mktemp("undisturbed")
        trained(backend, out, 2, *SAVES, "--max_train_epochs", "2")
        return out

    return of


@kohyas
@pytest.mark.parametrize("fault", ["sigkill@3", "sigkill@6:1", "sigkill@5:0", "stop_requested@2:1"])
def test_a_group_that_is_killed_or_stopped_resumes_bit_for_bit(backend, fault, tmp_path, undisturbed):
    """SIGKILL of both ranks or of one of them: the other does not stay. A stop that one is asked for stops both."""
    killed = train(backend, tmp_path, 2, *SAVES, "--max_train_epochs", "2", fault=fault)
    assert killed.returncode not in (0, -signal.SIGKILL), killed.stdout[-2000:]
    state = checkpoint.newest_valid(tmp_path / "made", deep=True)
    assert state is not None
    if fault.startswith("stop_requested"):
        assert state.name == "tiny-step00000003-state"
        ended = [(b.rank, b.step, b.outcome) for b in heartbeat.read_all(tmp_path / "beats")]
        assert ended == [(0, 3, "stopped"), (1, 3, "stopped")]
    plain = undisturbed(backend)
    more = (*SAVES, "--max_train_epochs", "2", "--resume", str(state))
    assert trained(backend, tmp_path, 2, *more) == losses(plain)
    final = "made/tiny.safetensors"
    assert resume_helpers.tensors(tmp_path / final) == resume_helpers.tensors(plain / final)


@kohyas
def test_a_smaller_world_is_refused_before_anything_is_written(backend, tmp_path):
    done = train(backend, tmp_path, 1, "--max_train_steps", "2", env={"HANGPROOF_WORLD": "2"})
    assert done.returncode == 1
    said = "hangproof: this run asks for 2 processes (nodes x gpus in run.toml), but the launcher started 1."
    assert said in done.stdout and "Nothing was trained." in done.stdout
    assert not (tmp_path / "made").exists()
    (beat,) = heartbeat.read_all(tmp_path / "beats")
    assert beat.outcome == "failed" and beat.note.startswith("this run asks for 2 processes")


def test_a_rank_that_stands_still_ends_the_others_wait(work, tmp_path):
    """Rank 1 is stopped as by Ctrl-Z; rank 0 waits for it in the next step, not for ever. The launcher ends rank 1."""
    done = together(work, tmp_path, 2, fault="sigstop@3:1", env={"HANGPROOF_PHASE_STEP_S": "6"})
    assert done.returncode == 1 and "waited 6 s for any progress in phase step" in done.stdout, done.stdout[-3000:]
    first = heartbeat.read_all(tmp_path / "beats")[0]
    assert (first.step, first.outcome) == (3, "deadline")


# Requests: both ranks act at the same step, and the training stays the same.


def all_done(folder, beats):
    found = {event["request"]: event for event in events(folder, step_requests.EVENT)}
    assert {kind: event["done"] for kind, event in found.items()} == dict.fromkeys(step_requests.KINDS, True), found
    assert [beat.outcome for beat in heartbeat.read_all(beats)] == ["done", "done"]
    return found


def test_two_processes_of_the_built_in_trainer(work, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a thing --w 64 --h 64 --s 2 --d 5\n", encoding="utf-8")
    more = {"max_train_steps": 40, "sample_prompts": prompts, "sample_every_n_steps": 1000, "network_dropout": 0.2}
    for name, env in (("plain", {}), ("asked", ASKED)):
        done = together(work, tmp_path / name, 2, env=env, **more)
        assert done.returncode == 0, done.stdout[-3000:]
    all_done(tmp_path / "asked" / "run", tmp_path / "asked" / "beats")
    one, other = (trainer_helpers.sha(tmp_path / name / "made/tiny.safetensors") for name in ("plain", "asked"))
    assert one == other


@kohyas
def test_two_processes_of_kohyas_trainers(backend, tmp_path):
    folder = tiny_musubi.workdir() if backend == "musubi" else tiny_sd_scripts.workdir()
    more = ["--sample_prompts", str(folder / "prompts.txt"), "--sample_every_n_epochs", "100"]
    more += ["--save_state", "--save_every_n_steps", "100"]
    steps = {"max_train_steps": "16"} if backend == "sd-scripts" else {}
    more += [] if steps else ["--max_train_steps", "16"]
    for name, env in (("plain", {}), ("asked", ASKED)):
        trained(backend, tmp_path / name, 2, *more, env=env, **steps)
    found = all_done(tmp_path / "asked", tmp_path / "asked" / "beats")
    images = list((tmp_path / "asked/made/sample").glob(f"*_{found['sample']['step']:06d}_*"))
    prompts = [line for line in (folder / "prompts.txt").read_text().splitlines() if line.strip() and line[0] != "#"]
    assert len(images) == len(prompts)  # each rank makes its share, at the same step
    one, other = (resume_helpers.tensors(tmp_path / name / "made/tiny.safetensors") for name in ("plain", "asked"))
    assert one == other
