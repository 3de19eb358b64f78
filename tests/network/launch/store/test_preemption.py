"""Everything of a run is killed at random moments, and an empty machine continues from the store alone: the same bytes.

The short form kills once, while a checkpoint is copied. The campaign (`-m long`) kills 20 times for each kind of store, and the
built-in trainer too; `python -m benchmarks preemption` runs it against any store.
"""

import pytest
from store_servers import KINDS, moto, serving

from benchmarks import preemption


@pytest.fixture(scope="module")
def moto_port():
    """A function that starts moto when it is called first."""
    running: list = []

    def port() -> int:
        if not running:
            running.append(moto())
            running.append(running[0].__enter__())
        return running[1]

    yield port
    if running:
        running[0].__exit__(None, None, None)


def campaign(kind, training, kills, seed, tmp_path, monkeypatch, moto_port, every=0) -> dict:
    """The campaign's result on a running store of this kind."""
    made = preemption.training_of(training, kills, every)
    made.expected()  # from the cache, before $HOME is that of the store
    with serving(kind, tmp_path, monkeypatch, moto_port) as server:
        # A call may take a sixth of the lease's period: more than on a busy machine the start of a library and a connection.
        environment, limits = {}, {"lease_s": 3 if kind == "folder" else 8}
        if kind == "hub":
            from huggingface_hub import constants

            environment = {"HF_ENDPOINT": constants.ENDPOINT, "HF_HUB_OFFLINE": "0"}
            limits = {"lease_s": 12}
        return preemption.campaign(made, server.address, kills, seed, tmp_path / "machines", environment, limits)


def judge(result: dict, kills: int, intervals: int) -> None:
    """intervals: save intervals that may be repeated after a kill."""
    assert not result["violations"], "\n".join(result["violations"])
    assert result["kills"] == kills
    assert result["repeated_max"] <= intervals * result["save_interval"]


def test_a_run_killed_while_it_copies_continues_on_an_empty_machine(tmp_path, monkeypatch, moto_port):
    # Saves follow each other so closely that a copy can take as long as an interval.
    judge(campaign("folder", "toy", 1, 7, tmp_path, monkeypatch, moto_port), kills=1, intervals=2)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_20_kills_at_random_moments_lose_nothing(kind, tmp_path, monkeypatch, moto_port):
    # On a busy machine, a copy to the hub takes longer than half of 120 steps.
    every = 240 if kind == "hub" else 120
    judge(campaign(kind, "toy", 20, 7, tmp_path, monkeypatch, moto_port, every), kills=20, intervals=1)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_20_kills_of_the_built_in_trainer_give_the_same_lora(tmp_path, monkeypatch, moto_port):
    judge(campaign("s3", "tiny", 20, 1, tmp_path, monkeypatch, moto_port), kills=20, intervals=2)
