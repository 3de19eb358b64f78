"""Several processes of the built-in trainer: as many as asked for or none, and the same training as one process."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from trainer_helpers import flags, fork, good, sha
from ui_helpers import free_port
from world_trainings import STEPS, difference, losses, together, watched

from guards import checkpoint, heartbeat
from trainer import states

ACCUMULATION = 2


def trained(work, out, processes: int, **changed):
    """Train with so many processes, forked with the variables that the launcher sets; the result of the first."""
    (out / "run").mkdir(parents=True, exist_ok=True)
    settings = {"max_train_steps": STEPS, "save_state": True, "save_every_n_steps": 2, **changed}
    argv = flags(work["model"], work["config"], out / "made", **settings)
    env = watched(out, out / "run", processes, "")
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_RANK": "0"}
    world |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    with ThreadPoolExecutor(processes) as pool:
        ranks = [world | {"RANK": str(n), "LOCAL_RANK": str(n)} if processes > 1 else {} for n in range(processes)]
        first, *others = pool.map(lambda rank: fork(argv, **env, **rank), ranks)
    assert [other.returncode for other in others] == [0] * (processes - 1), others
    return good(first)


@pytest.fixture(scope="module")
def undisturbed(work):
    """A run of two processes, and what it printed."""
    out = work["folder"] / "undisturbed"
    return out, trained(work, out, 2, gradient_accumulation_steps=ACCUMULATION).stdout


def test_two_processes_train_as_one_with_twice_the_accumulation(work, tmp_path, undisturbed):
    several, log = undisturbed
    trained(work, tmp_path, 1, gradient_accumulation_steps=2 * ACCUMULATION)
    one = losses(tmp_path / "run")
    assert "PyTorch finds no GPU here: 2 processes train together" in log
    assert len(one) == STEPS and difference(one, losses(several / "run")) < 1e-5
    beats = heartbeat.read_all(several / "beats")
    assert [(b.rank, b.world, b.step, b.outcome) for b in beats] == [(r, 2, STEPS, "done") for r in range(2)]


def test_a_smaller_world_is_refused_by_every_rank_before_it_writes(work, tmp_path):
    done = together(work, tmp_path, 2, env={"HANGPROOF_WORLD": "3"})
    assert done.returncode == 1
    sentence = "error: this run asks for 3 processes (nodes x gpus in run.toml), but the launcher started 2."
    # The launcher kills the others as soon as the first one has refused, so they may not get to their own sentence.
    assert 1 <= done.stdout.count(sentence) <= 2 and "python -m runs render NAME" in done.stdout
    assert not (tmp_path / "made").exists() and not (tmp_path / "run" / "metrics.jsonl").exists()
    beats = heartbeat.read_all(tmp_path / "beats")
    assert "failed" in {b.outcome for b in beats} and not {b.outcome for b in beats} - {"failed", "running"}


def test_a_killed_group_ends_and_resumes_bit_for_bit(work, tmp_path, undisturbed):
    """Started by the real launcher, which ends the ranks that are left."""
    settings = {"save_every_n_steps": 2, "gradient_accumulation_steps": ACCUMULATION}
    killed = together(work, tmp_path, 2, fault="sigkill@4:1", **settings)
    assert killed.returncode not in (0, -signal.SIGKILL), killed.stdout[-2000:]
    assert killed.stdout.count("saving checkpoint") <= 2, "one rank saves"
    state = checkpoint.newest_valid(tmp_path / "made", deep=True)
    assert state is not None
    trained(work, tmp_path, 2, resume=state, gradient_accumulation_steps=ACCUMULATION)
    assert losses(tmp_path / "run") == losses(undisturbed[0] / "run")
    assert sha(tmp_path / "made" / "tiny.safetensors") == sha(undisturbed[0] / "made" / "tiny.safetensors")


def test_a_state_of_two_processes_continues_on_one_with_twice_the_accumulation(work, tmp_path, undisturbed):
    state = undisturbed[0] / "made" / "tiny-step00000004-state"
    done = trained(work, tmp_path, 1, resume=state, gradient_accumulation_steps=2 * ACCUMULATION)
    assert "differs from an undisturbed run" not in done.stdout
    assert difference(losses(undisturbed[0] / "run")[4:], losses(tmp_path / "run")) < 1e-5
    assert states.batches({"gradient_accumulation_steps": 2, "world": 1}) == 2
