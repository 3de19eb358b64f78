"""Everything of a run is killed at random moments, and an empty machine continues from the store alone: the same bytes.

20 kills for each kind of store.
"""

import random
import shutil
import time

import pytest
from machines import Machine, Toy, enter_processes
from seeds import seed
from store_servers import KINDS, serving

KILLS = ("copying", "training", "copying", "training", "restoring", "copying", "training", "starting")  # taken in turn
END_S = 900.0


def killed(machine: Machine, moment: str, draw: random.Random, address: str, known: bool) -> list[int]:
    """Let a machine train, and kill all of it at the moment; the steps that it trained."""
    training = machine.training
    try:
        if not known:
            training.create(machine.data, {"store": address})
        elif not machine.restore(address, draw.uniform(0.05, 2.0) if moment == "restoring" else None):
            return []
        machine.run()
        if moment == "starting":
            time.sleep(draw.uniform(0.0, 3.0))
        else:
            first = machine.until(lambda: training.trained(machine.data), "the first step")[0]
            if moment == "copying":
                copies = lambda: training.trained(machine.data)[-1] > first and machine.copying()  # noqa: E731
                machine.until(copies, "a copy under way")
                time.sleep(draw.uniform(0.0, 0.3))
            else:
                time.sleep(draw.uniform(0.0, 2.5 * training.every * training.step_s))
        assert machine.process.poll() is None, f"the run ended before its kill:\n{machine.output()[-2000:]}"
    finally:
        machine.kill()
    return training.trained(machine.data)


def campaign(training, address, kills, drawn, work, environment, limits) -> int:
    """Play the run on kills + 1 machines; the most steps that a machine trained once more after a kill."""
    draw, enter, repeated, trained, saved, known = random.Random(drawn), enter_processes(), 0, 0, 0, False
    for number in range(kills + 1):
        machine = Machine(training, work / f"machine-{number:02d}", dict(environment), enter, limits)
        if number == kills:
            assert known and machine.restore(address)
            machine.run()
            try:
                assert machine.wait(END_S) == 0, machine.output()[-2000:]
            finally:
                machine.kill()
            steps = training.trained(machine.data)
        else:
            moment = KILLS[number % len(KILLS)]
            steps = killed(machine, moment if known or moment != "restoring" else "training", draw, address, known)
        if steps:
            assert steps[0] > saved - training.every, f"machine {number} began at {steps[0]}, there was step {saved}"
            repeated, trained = max(repeated, trained - steps[0] + 1), steps[-1]
        known = known or machine.status().get("store", {}).get("step") is not None
        saved = max(saved, machine.newest_checkpoint()) if known else 0
        if number < kills:
            shutil.rmtree(machine.root)
    assert machine.lora() == training.expected(), "the LoRA is not that of an undisturbed run"
    return repeated


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_20_kills_at_random_moments_lose_nothing(kind, tmp_path, monkeypatch):
    every = 240 if kind == "hub" else 120  # on a busy machine, a copy to the hub takes longer than half of 120 steps
    training = Toy(every * 32, every)  # room for as many machines as there are kills
    with serving(kind, tmp_path, monkeypatch) as server:
        # A call may take a sixth of the lease's period: on a busy machine, a library and a connection take less.
        environment, limits = {}, {"lease_s": {"folder": 3, "hub": 12}.get(kind, 8)}
        if kind == "hub":
            from huggingface_hub import constants

            environment = {"HF_ENDPOINT": constants.ENDPOINT, "HF_HUB_OFFLINE": "0"}
        assert campaign(training, server.address, 20, seed(), tmp_path / "machines", environment, limits) <= every
