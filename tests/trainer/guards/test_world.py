"""Several processes of the built-in trainer: as many as asked for or none, and the same training as one process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from trainer_helpers import flags, fork, good
from ui_helpers import free_port
from world_trainings import STEPS, difference, losses, watched

from guards import heartbeat
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


def test_a_state_of_two_processes_continues_on_one_with_twice_the_accumulation(work, tmp_path, undisturbed):
    state = undisturbed[0] / "made" / "tiny-step00000004-state"
    done = trained(work, tmp_path, 1, resume=state, gradient_accumulation_steps=2 * ACCUMULATION)
    assert "differs from an undisturbed run" not in done.stdout
    assert difference(losses(undisturbed[0] / "run")[4:], losses(tmp_path / "run")) < 1e-5
    assert states.batches({"gradient_accumulation_steps": 2, "world": 1}) == 2
