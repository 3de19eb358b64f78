"""Two machines train one run: a rank stops, either machine is lost, a link is cut, a user stops it.

Each ends with the LoRA of an undisturbed pair. A shell's loop starts a machine's part again, as in docs/machines.md.

python -m pytest tests/campaigns/test_nodes.py          5 minutes
"""

import os
import signal
import time
from functools import partial

import netns
import pytest
import tiny_runs
from machines_helpers import pair
from monitor_helpers import stop, wait_for
from run_facts import incidents, status

from trainer import tiny_flux

STEPS, EVERY = 30, 5
pytestmark = pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run, not started."""
    root = tmp_path_factory.mktemp("data")
    lengths = {"max_train_steps": STEPS, "save_every_n_steps": EVERY, "repeats": 10}
    tiny_flux.ensure(root / "models" / "tiny-flux")
    return tiny_runs.create(root, name="pair", nodes=2, rank=4, **lengths)


@pytest.fixture(scope="module")
def undisturbed(run, tmp_path_factory):
    """The LoRA of two machines that nothing happens to."""
    with pair(run, tmp_path_factory.mktemp("undisturbed")) as two:
        assert two.completed()["attempt"] == 1
        return two.result()


def lose(two, number):
    two.machines[number].power_off()
    time.sleep(2)
    two.start(number)


def cut(two):
    two.machines[1].link(False)
    wait_for(lambda: not two.machines[1].find("-m trainer"), 120, "the machine ends its rank by itself")
    two.machines[1].link(True)


FAULTS = {
    "rank 1 is stopped": lambda two: os.kill(two.trainer(1), signal.SIGSTOP),
    "machine 1 is lost": partial(lose, number=1),
    "the first machine is lost": partial(lose, number=0),
    "its link is cut": cut,
}


@pytest.mark.parametrize("what", FAULTS)
def test_the_group_starts_again_from_the_last_state_and_completes_with_the_same_lora(what, run, undisturbed, tmp_path):
    with pair(run, tmp_path) as two:
        two.wait_step(EVERY + 2)
        FAULTS[what](two)
        now = two.completed()
    assert two.result() == undisturbed, two.console()
    assert now["step"] == STEPS and now["attempt"] >= 2, two.console()
    if what == "rank 1 is stopped":
        (found,) = incidents(two.run / "machines" / "1")
        assert (found["kind"], found["cause"], found["evidence"]["rank"]) == ("hang", "trainer_stopped", 1), found


def test_the_users_stop_saves_a_checkpoint_and_ends_both(run, undisturbed, tmp_path):
    with pair(run, tmp_path) as two:
        two.wait_step(EVERY + 2)
        stop(two.run)
        assert {number: process.wait(120) for number, process in two.processes.items()} == {0: 3, 1: 0}, two.console()
        now = status(two.run)
        assert now["state"] == "stopped" and now["checkpoint"]["step"] == now["step"], now
        two.start()
        two.completed()
    assert two.result() == undisturbed
