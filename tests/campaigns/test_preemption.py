"""Everything of a run is killed at random moments, and an empty machine continues from the store alone: the same bytes.

20 kills for each kind of store, and with the built-in trainer; `python -m benchmarks preemption` runs it against any store. And two
machines with addresses of their own start one run at once while their links are cut: there is never a second writer
(`python -m benchmarks two_machines` plays 100 trials).
"""

import netns
import pytest
from store_servers import KINDS, serving

from benchmarks import preemption, two_machines


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


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_20_kills_at_random_moments_lose_nothing(kind, tmp_path, monkeypatch, moto_port):
    # On a busy machine, a copy to the hub takes longer than half of 120 steps.
    every = 240 if kind == "hub" else 120
    judge(campaign(kind, "toy", 20, 7, tmp_path, monkeypatch, moto_port, every), kills=20, intervals=1)


@pytest.mark.timeout(7200)
def test_20_kills_of_the_built_in_trainer_give_the_same_lora(tmp_path, monkeypatch, moto_port):
    judge(campaign("s3", "tiny", 20, 1, tmp_path, monkeypatch, moto_port), kills=20, intervals=2)


def test_two_machines_with_cut_links_never_both_write(tmp_path):
    if why := netns.missing():
        pytest.skip(why)
    result = two_machines.campaign(1, 0, tmp_path)
    assert not result["violations"], "\n".join(result["violations"])
    assert result["trials"] == 1 == sum(result["outcomes"].values())
