"""What a rank refuses before it joins a group, and by which backend it meets the others. Its waits: test_barrier.py."""

from contextlib import nullcontext

import pytest
import torch

from guards import world

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
OURS = (world.VARIABLE, world.NODE_VARIABLE, world.USE_CPU, "HANGPROOF_HEARTBEAT")
NCCL = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.fixture
def started(monkeypatch):
    """Sets what a launcher sets; nothing is left of this machine's own."""
    for name in (*LAUNCHED, *OURS, NCCL):
        monkeypatch.setenv(name, "")  # so that what is set here is removed again
        monkeypatch.delenv(name)

    def set_all(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_all


@pytest.mark.parametrize(
    ("set_by_launcher", "sentence"),
    [
        ({"HANGPROOF_WORLD": 4, "WORLD_SIZE": 2}, "asks for 4 processes .* but the launcher started 2"),
        ({"HANGPROOF_NODE": 1}, "this is machine 1 .* its launcher calls it machine 0. Unset HANGPROOF_NODE"),
        ({"HANGPROOF_NODE": "x"}, "this is machine x .* its launcher calls it machine 0"),
        ({}, None),
        ({"HANGPROOF_WORLD": 2, "WORLD_SIZE": 2}, None),
        ({"HANGPROOF_NODE": 1, "WORLD_SIZE": 2, "GROUP_RANK": 1}, None),
    ],
)
def test_a_world_that_is_not_the_one_asked_for_is_refused(started, set_by_launcher, sentence):
    started(**set_by_launcher)
    with pytest.raises(world.WorldError, match=sentence) if sentence else nullcontext():
        world.check_launcher()


def test_the_processes_meet_on_gpus_or_else_on_processors_and_too_few_gpus_and_apples_are_refused(started, monkeypatch):
    def machine(gpus: int, mps: bool = False) -> None:
        """Replaces what torch finds on this machine."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpus > 0 or mps)

    machine(gpus=2)
    started(WORLD_SIZE=4, LOCAL_WORLD_SIZE=2)
    assert "each on a GPU of its own" in world.choose_backend()
    assert world.os.environ[NCCL] == "1" and world.USE_CPU not in world.os.environ
    machine(gpus=1)
    with pytest.raises(world.WorldError, match="2 processes run on this machine, but PyTorch finds 1 GPU"):
        world.choose_backend()
    machine(gpus=0, mps=True)
    with pytest.raises(world.WorldError, match="cannot train together on one of Apple's GPUs .* Set gpus to 1"):
        world.choose_backend()
    machine(gpus=0)
    started(**{"WORLD_SIZE": 2, world.USE_CPU: "false"})
    assert "PyTorch finds no GPU here: 2 processes train together" in world.choose_backend()
    assert world.os.environ[world.USE_CPU] == "true"


def test_a_group_that_is_not_complete_is_refused(started):
    started(WORLD_SIZE=2)
    world.check(2)
    with pytest.raises(world.WorldError, match="started 2 processes, but accelerate joined 1 of them"):
        world.check(1)


def test_machines_that_would_resume_different_states_start_again(started, monkeypatch):
    from torch import distributed

    def gather(names, own):
        names[:] = [own, "step00000010-state"]

    monkeypatch.setattr(distributed, "all_gather_object", gather)
    started(WORLD_SIZE=2, HANGPROOF_NODE=0)
    monkeypatch.setenv("HANGPROOF_RESUME", "/here/step00000010-state")
    world.check(2)
    monkeypatch.setenv("HANGPROOF_RESUME", "")
    with pytest.raises(RuntimeError, match="rank 0: the start, rank 1: step00000010-state") as raised:
        world.check(2)
    assert not isinstance(raised.value, world.WorldError), "a usage error would not be tried again"
